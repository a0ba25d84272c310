"""Engines of the sections: models and flags on a GPU, and in a rehearsal without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from driver import models
from driver.stage import Stage, stage

from gpu_sections.figures import Figures

# Several engines share the GPU: each takes a fixed amount for KV, and starts if this fraction is free. CUDA
# graphs of decode steps without torch.compile are captured within seconds.
_GPU_VLLM: Final = ("--gpu-memory-utilization", "0.2", "--block-size", "32")
_GRAPHS: Final = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}',
)
# The archive has no compiled operators for a CPU.
_PLAIN_TORCH: Final = ("--compilation-config", '{"mode": 0, "custom_ops": ["none"]}')
# FlashInfer and SGLang's compiled attention are not in the archive of script/gpu-pack.
GPU_SGLANG: Final = (
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    # SGLang cannot size its host memory itself in every container, and then shares no KV.
    *("--disable-cuda-graph", "--mem-fraction-static", "0.3", "--hicache-size", "8"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """What an engine of a section has to hold."""

    tokens: int
    """Longest request, in tokens."""
    kv_gib: int
    """Memory for KV of each engine, in GiB."""
    requests: int = 16
    """Requests at a time."""


def dtype(figures: Figures) -> str:
    """The dtype of models and engines."""
    return "float32" if figures.rehearse else "bfloat16"


def vllm_flags(figures: Figures, size: Size, *, graphs: bool = False) -> tuple[str, ...]:
    """Flags of both sides' vLLM.

    Args:
        graphs: Whether decode steps run as CUDA graphs, which a rehearsal has not.
    """
    flags = (
        *("--dtype", dtype(figures), "--max-model-len", str(size.tokens)),
        *("--max-num-seqs", str(size.requests)),
    )
    if figures.rehearse:
        return (*flags, "--block-size", "32", *_PLAIN_TORCH)
    memory = ("--kv-cache-memory-bytes", str(size.kv_gib << 30))
    return (*flags, *_GPU_VLLM, *memory, *(_GRAPHS if graphs else ()))


@contextmanager
def engines(figures: Figures, size: Size, *, graphs: bool = False) -> Iterator[Stage]:
    """A stage whose engines start side by side, save every page, and load whatever the store has."""
    sglang = () if figures.rehearse else GPU_SGLANG
    with stage(
        flags=vllm_flags(figures, size, graphs=graphs),
        kv_gib=1,  # of a rehearsal; on a GPU a flag has it
        sglang_flags=(*sglang, "--context-length", str(size.tokens)),
        start_together=True,
    ) as here:
        here.env |= {"CORNPLUG_STORE_LOAD_WHEN": "always", "CORNPLUG_ENGINE_SAVE": "always"}
        yield here


def small_model(figures: Figures) -> Path:
    """A text model with which an engine starts quickly."""
    return models.qwen2_text(**(_TINY if figures.rehearse else _SMALL), dtype=dtype(figures))


def large_model(figures: Figures) -> Path:
    """A text model with the layers of Llama-3.1-8B: 7 billion parameters, 128 KiB of KV per token."""
    size = _TINY if figures.rehearse else _EIGHT_B
    return models.large_qwen2_text(**size, dtype=dtype(figures), max_positions=40960)


_TINY: Final = {"hidden_size": 64, "layers": 2, "heads": 2}
_EIGHT_B: Final = {"hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "intermediate_size": 14336}
_SMALL: Final = {"hidden_size": 1024, "layers": 8, "heads": 8, "kv_heads": 4}


def differences(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference of two answers' log-probabilities."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)
