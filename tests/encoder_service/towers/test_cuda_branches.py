"""Every CUDA branch of the service, family by family, where there is no GPU: see `simulated_gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cornplug.encoder_service import model_loader
from cornplug.encoder_service.execution.executor import EncodeBatch, InProcessExecutor
from cornplug.encoder_service.model_loader import LoadedModel, WeightPlacement
from cornplug.encoder_service.towers import qwen2_vl, varlen_attention
from cornplug.encoder_service.towers.base import TowerItem
from devkit.checkpoints import llava

from ..simulated_gpu import SimulatedGpu, simulated_gpu
from ..tower_rig import CPU, wire
from .test_towers import CASES, Tiny, tiny

__all__ = ["tiny"]
SECOND = torch.device("cuda:1")


SOON = ("llava_next", "internvl", "qwen2_audio", "qwen2_5_vl video", "qwen3_vl")
"""Cases that `script/test` runs, one of each kind of tower."""


def loaded(path: Path, dtype: str, device: torch.device) -> LoadedModel:
    checkpoint, served = model_loader.read_checkpoint(str(path), dtype)
    return model_loader.load_model(checkpoint, served, WeightPlacement(dtype=dtype, device=device))


def items_of(name: str, path: Path, model: LoadedModel) -> list[TowerItem]:
    return [model.tower.prepare(wire(made)) for made in CASES[name].inputs(path)]


def task(
    model: LoadedModel, items: Sequence[TowerItem], kept: Sequence[torch.Tensor | None] = ()
) -> EncodeBatch:
    return EncodeBatch(
        items=tuple(items),
        features=tuple(kept) or (None,) * len(items),
        targets=tuple((model, i) for i in range(len(items))),
        returns_features=True,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, "bfloat16", marks=[] if name in SOON else pytest.mark.more) for name in CASES),
        ("llava", "float32"),
        ("qwen2_vl", "float32"),
    ],
)
def test_executor_cuda_batch_is_staged_computed_and_copied_back(name: str, dtype: str, tiny: Tiny) -> None:
    path = tiny(name)
    here = loaded(path, dtype, CPU)
    items = items_of(name, path, here)
    wanted = InProcessExecutor(CPU).run(task(here, items))
    with simulated_gpu() as cuda:
        there = loaded(path, dtype, SECOND)
        executor = InProcessExecutor(SECOND)
        made = executor.run(task(there, items))
        # Features of one of them are kept on the host from before.
        kept = [wanted.features[0], *[None] * (len(items) - 1)]
        again = executor.run(task(there, items, kept))
    for on_cuda in (made, again):
        assert [e.shape for e in on_cuda.embeddings] == [e.shape for e in wanted.embeddings]
    assert {i: f.shape for i, f in made.features.items()} == {i: f.shape for i, f in wanted.features.items()}
    assert set(again.features) == set(range(1, len(items)))
    for tensor in (*made.embeddings, *made.features.values()):
        assert (tensor.device, tensor.dtype) == (CPU, there.dtype)
        assert tensor.is_contiguous()
    _in_order(cuda)


def _in_order(cuda: SimulatedGpu) -> None:
    """Inputs and results are copied on streams of their own, and waited for before they are read."""
    once = [
        ("enter", "inputs"),
        ("record", "inputs"),
        ("leave", "inputs"),
        ("wait", ("compute", "inputs")),
        ("record", "compute"),
        ("enter", "results"),
        ("wait", ("results", "compute")),
        ("record", "results"),
        ("leave", "results"),
        ("synchronize", "results"),
    ]
    assert cuda.done == [*once, *once]
    assert cuda.mode.streams_told
    assert all(t.device == SECOND for t in cuda.mode.streams_told)


def test_executor_cuda_results_are_copied_while_next_batch_computes(tmp_path: Path) -> None:
    path = llava(tmp_path / "m")
    items = items_of("llava", path, loaded(path, "float32", CPU))
    begun_meanwhile: list[int] = []
    with simulated_gpu() as cuda:
        there = loaded(path, "float32", SECOND)
        executor = InProcessExecutor(SECOND)

        def next_batch() -> None:
            assert not executor._scheduler._busy
            cuda.on_synchronize = lambda: None
            begun_meanwhile.append(len(executor.run(task(there, items[1:])).embeddings))

        cuda.on_synchronize = next_batch
        assert len(executor.run(task(there, items[:1])).embeddings) == 1
    assert begun_meanwhile == [len(items) - 1]


def test_executor_thread_computes_on_executor_device(tmp_path: Path) -> None:
    """Each thread begins on device 0: kernels that ask for the current device would run there."""
    path = llava(tmp_path / "m")
    items = items_of("llava", path, loaded(path, "float32", CPU))
    seen: list[int] = []
    with simulated_gpu() as cuda:
        there = loaded(path, "float32", SECOND)
        real = there.tower.encode

        def encode(batch: Sequence[TowerItem]) -> list[torch.Tensor]:
            seen.append(cuda.device)
            return real(batch)

        there.tower.encode = encode  # type: ignore[method-assign]
        executor = InProcessExecutor(SECOND)
        executor.run(task(there, items[:1]))
        assert cuda.device == 0
    assert seen == [1]


def test_attention_half_precision_takes_varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: varlen_attention.SegmentOffsets
    ) -> torch.Tensor:
        calls.append((q.dtype, segments.offsets.device, segments.offsets.dtype, segments.longest))
        return torch.empty_like(q)

    monkeypatch.setattr(varlen_attention, "load_kernel_attention", lambda: kernel)
    with simulated_gpu():
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.zeros(10, 2, 64, device=SECOND, dtype=dtype)
            out = varlen_attention.attention(q, q, q, varlen_attention.SegmentOffsets([6, 4], SECOND))
            assert (out.device, out.shape) == (SECOND, q.shape)
    assert calls == [(torch.bfloat16, SECOND, torch.int32, 6)]


def test_cuda_branches_rig_refuses_operands_on_two_devices() -> None:
    """Else nothing above would say anything."""
    with simulated_gpu():
        there, here = torch.zeros(2, device=SECOND), torch.zeros(2)
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: torch.cat([there, there], out=torch.empty(4, pin_memory=True)),
            lambda: there + torch.zeros(2, device="cuda:0"),
            lambda: there[0].item(),
            lambda: there.tolist(),
        ):
            with pytest.raises(Exception, match=r"(?i)same device|data|aten"):
                wrong()
        # What is on the host is real.
        assert (here + 1).tolist() == [1.0, 1.0]


def test_executor_cuda_raw_pixels_are_normalised_on_the_device(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("qwen2_vl")
    devices: list[torch.device] = []
    original = qwen2_vl.normalise

    def normalise(pixels: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        devices.extend((pixels.device, norm.device))
        return original(pixels, norm, dtype)

    monkeypatch.setattr(qwen2_vl, "normalise", normalise)
    raw = {
        "pixel_values": torch.zeros(16, 1176, dtype=torch.uint8),
        "image_grid_thw": torch.tensor([1, 4, 4]),
        "pixel_norm": torch.ones(2, 3),
    }
    with simulated_gpu():
        there = loaded(path, "bfloat16", SECOND)
        made = InProcessExecutor(SECOND).run(task(there, [there.tower.prepare(wire(raw))]))
    assert devices == [SECOND, SECOND]
    assert len(made.embeddings[0]) == 4
