"""Stages of the encoder service for one image, and which of them limits a rate of images on one H100.

    python benchmarks/encoder_pipeline.py [--quick] [--rate 500] [--cores N] [--tower-rate R] [--out DIR]

JPEGs of 1280 x 960 pixels, each with pixels of its own, to `/v1/encode` in this process, without a socket.
The stages on cores are measured, as CPU time. Without a GPU, the device is arithmetic: an executor that
computes nothing hands out embeddings of the true size, a tower takes its FLOPs at half of the H100's dense
bfloat16 peak, and copies take PCIe 5 x16. `--tower-rate` puts in the images/s that `tower_throughput.py`
measured there.

"decode" runs in decoding processes, a core each. "digest", "processor" and "check" run in threads, in C code
that releases the interpreter. "interpreter" is the service's CPU for a Qwen2-VL image of 56 x 56 pixels:
nearly all of it is Python, which one process runs on one core, whatever the number of its threads. "copies"
is the rest of the service's CPU: the file's bytes, results into the store, and pages that the kernel zeroes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import machine
import numpy as np
import torch
from driver import models
from driver.asgi_service import form, jpeg, others_s, post, process_s, running_loop
from rich.console import Console

from cornplug.config import EncoderConfig
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.executor import BatchResult, EncodeBatch, InProcessExecutor
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats import image
from cornplug.encoder_service.formats.image import RgbPixels
from cornplug.encoder_service.formats.messages import DEFAULT_DECODING
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.prepared_media import ImagePreprocessor
from cornplug.encoder_service.preprocess.preparer import DEFAULT_SAMPLING
from cornplug.encoder_service.preprocess.preprocessor import IN_PROCESS_CONTEXT, MediaLimits
from cornplug.planner.inputs.gpu_catalog import gpu_table
from cornplug.store.memory import MemoryStore
from devkit.checkpoints import CLIP_L_336

SECRET: Final = b"s" * 32
WIDTH, HEIGHT, SMALL = 1280, 960, 56
GPU: Final = "H100"
OF_PEAK: Final = 0.5
"""What `tower_throughput.py` aims at."""
PCIE_GB_S: Final = 50.0
"""PCIe 5 x16 has 63 GB/s; large copies from pinned memory reach about this."""
HEADINGS: Final = ("stage", "runs on", "ms an image", "images/s of one", "needed")
_WARM_UP: Final = 3
"""Images before those that count: they start threads and processes."""
_SMALL_TOWER: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """A published tower, whose work the device is asked for."""

    layers: int
    width: int
    mlp: int
    hidden: int
    """Width of an embedding's row."""
    patches_a_row: int
    first_rows: int = 0
    """Rows that no embedding has."""
    projector_parameters: int

    def rows(self, tokens: int) -> int:
        return (tokens - self.first_rows) // self.patches_a_row

    def flops(self, tokens: int) -> float:
        """Of one image: matrices, attention, projector."""
        block = 2 * (4 * self.width**2 + 2 * self.width * self.mlp) + 4 * tokens * self.width
        return tokens * self.layers * block + 2 * self.projector_parameters * self.rows(tokens)


CLIP_L: Final = TowerSize(
    layers=23, width=1024, mlp=4096, hidden=4096, patches_a_row=1, first_rows=1,
    projector_parameters=1024 * 4096 + 4096**2,
)  # fmt: skip
QWEN2_VL: Final = TowerSize(
    layers=32, width=1280, mlp=5120, hidden=3584, patches_a_row=4, projector_parameters=5120**2 + 5120 * 3584
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of an image's way."""

    name: str
    runs_on: str
    seconds: float
    """Of one image, on one such unit."""

    def needed(self, rate: float) -> float:
        """Units for so many images a second."""
        return rate * self.seconds

    def cells(self, rate: float) -> list[str]:
        each = f"{1 / self.seconds:.0f}" if self.seconds else "-"
        return [self.name, self.runs_on, f"{1e3 * self.seconds:.2f}", each, f"{self.needed(rate):.2f}"]


class NoDevice(InProcessExecutor):
    """Embeddings of the true size, and no computation."""

    def __init__(self, size: TowerSize) -> None:
        super().__init__(torch.device("cpu"))
        self._size = size
        self._embeddings: dict[int, torch.Tensor] = {}

    def run(self, batch: EncodeBatch) -> BatchResult:
        rows = [self._size.rows(batch.items[index].tokens) for _, index in batch.targets]
        return BatchResult(embeddings=tuple(map(self._embedding, rows)), features={})

    def _embedding(self, rows: int) -> torch.Tensor:
        if rows not in self._embeddings:
            self._embeddings[rows] = torch.ones(rows, self._size.hidden, dtype=torch.bfloat16)
        return self._embeddings[rows]


@dataclass(frozen=True, slots=True)
class Service:
    """The service in this process."""

    encoder: EncoderCore
    app: Any
    loop: asyncio.AbstractEventLoop

    def request(self, model: str, file: bytes) -> tuple[float, float, int]:
        """CPU seconds of one request, the service's and its decoding processes', and the service's page
        faults. Exits on a refusal."""
        body = form({"model": model.encode(), "inline": b"false"}, file)
        decoders, faults, began = self._decoders_s(), _faults(), others_s()
        status, answer = asyncio.run_coroutine_threadsafe(post(self.app, body), self.loop).result()
        took = others_s() - began, self._decoders_s() - decoders, _faults() - faults
        if status != 200 or json.loads(answer)["origin"] != "computed":
            sys.exit(f"not computed: {answer!r}")
        return took

    def _decoders_s(self) -> float:
        lanes = self.encoder.decode_lanes
        return sum(map(process_s, lanes.process_ids())) if lanes is not None else 0.0


def main() -> int:
    """Measure, print and write; always 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="6 images a stage in place of 30")
    parser.add_argument("--rate", type=float, default=500.0, help="images/s on one GPU (default: 500)")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="default: this host's"
    )
    parser.add_argument("--tower-rate", type=float, help="measured images/s of the tower on the GPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # as the service beside a GPU
    rounds = 6 if chosen.quick else 30
    described = machine.describe()
    served = {
        "LLaVA, CLIP-L/336": (
            models.llava(vision={**CLIP_L_336, **_SMALL_TOWER}, hidden_size=64, layers=1),
            CLIP_L,
        ),
        "Qwen2-VL": (models.qwen2_vl(max_pixels=28 * 28 * 16384), QWEN2_VL),
    }
    with running_loop() as loop:
        python, _, _ = _requests(*served["Qwen2-VL"], loop, SMALL, SMALL, rounds)
        found = {}
        lines: list[str] = []
        for name, (path, size) in served.items():
            found[name], faults = _stages(path, size, loop, python, rounds, chosen.tower_rate)
            lines += _verdict(name, found[name], chosen.rate, chosen.cores)
            lines.append(f"{name}: {faults:.0f} page faults an image in the service.")
    _show(found, lines, chosen.rate, described)
    _write(chosen, found, lines, described)
    return 0


def _stages(
    path: Path,
    size: TowerSize,
    loop: asyncio.AbstractEventLoop,
    python: float,
    rounds: int,
    tower_rate: float | None,
) -> tuple[list[Stage], float]:
    """The stages of one image, and the service's page faults. `python`: seconds of the interpreter."""
    (loaded,) = ModelRegistry.open([str(path)], dtype="bfloat16", device="cpu").loaded_models()
    digest, processor, check, item_bytes, tokens = _prepared(loaded, rounds)
    whole, decode, faults = _requests(path, size, loop, WIDTH, HEIGHT, rounds)
    peak = gpu_table()[GPU].bf16_tflops * 1e12 * OF_PEAK
    stages = [
        Stage("decode", "core", decode),
        Stage("digest", "core", digest),
        Stage("processor", "core", processor),
        Stage("check", "core", check),
        Stage("copies", "core", max(0.0, whole - python - digest - processor - check)),
        Stage("interpreter", "service process", python),
        Stage("inputs to the GPU", "PCIe", item_bytes / (PCIE_GB_S * 1e9)),
        Stage("tower", GPU, 1 / tower_rate if tower_rate else size.flops(tokens) / peak),
        Stage("results from the GPU", "PCIe", 2 * size.rows(tokens) * size.hidden / (PCIE_GB_S * 1e9)),
    ]
    return stages, faults


def _requests(
    path: Path, size: TowerSize, loop: asyncio.AbstractEventLoop, width: int, height: int, rounds: int
) -> tuple[float, float, float]:
    """Medians of `Service.request` for images of this size."""
    registry = ModelRegistry.open([str(path)], dtype="bfloat16", device="cpu")
    with _service(registry, size, loop) as service:
        took = [
            service.request(str(path), jpeg(width, height, seed=seed)) for seed in range(rounds + _WARM_UP)
        ]
    whole, decode, faults = np.median(took[_WARM_UP:], axis=0)
    return float(whole), float(decode), float(faults)


def _prepared(loaded: LoadedModel, rounds: int) -> tuple[float, float, float, int, int]:
    """CPU seconds of digest, processor and check of one image; the tower's input in bytes and tokens."""
    file = jpeg(WIDTH, HEIGHT)
    pixels = RgbPixels.from_image(image.to_engine_rgb(image.decode(file, WIDTH * HEIGHT)))
    medium = ImagePreprocessor(loaded, MediaLimits()).decode(
        [file], "file", DEFAULT_SAMPLING, DEFAULT_DECODING, IN_PROCESS_CONTEXT
    )
    wanted = loaded.checkpoint.family.inputs["image"]
    inputs = {name: tensor for name, tensor in medium.preprocess().items() if name in wanted}
    item = loaded.tower.prepare(inputs)
    each: list[Callable[[], object]] = [
        pixels.digest,
        medium.preprocess,
        lambda: loaded.tower.prepare(inputs),
    ]
    digest, processor, check = (_median(partial(_cpu_s, work), rounds) for work in each)
    return digest, processor, check, sum(tensor.nbytes for tensor in item.tensors), item.tokens


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _median(measure: Callable[[], float], rounds: int) -> float:
    return float(np.median([measure() for _ in range(rounds + _WARM_UP)][_WARM_UP:]))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def _service(registry: ModelRegistry, size: TowerSize, loop: asyncio.AbstractEventLoop) -> Iterator[Service]:
    cache = ResultCache(MemoryStore(capacity_bytes=256 << 20).connect(), deadline_s=1.0)
    encoder = EncoderCore(registry, cache, secret=SECRET, executors=[NoDevice(size)])
    app = create_app(
        encoder, EncoderConfig(port=0, prepare_threads=1), secret=SECRET, drain_state=DrainState()
    )
    encoder.start_decoding()
    try:
        yield Service(encoder, app, loop)
    finally:
        encoder.close()


def _verdict(name: str, stages: list[Stage], rate: float, cores: int) -> list[str]:
    """What limits the rate, by arithmetic."""
    by_unit = {
        unit: sum(stage.seconds for stage in stages if stage.runs_on == unit)
        for unit in (GPU, "PCIe", "core")
    }
    python = next(stage.seconds for stage in stages if stage.runs_on == "service process")
    of_cores = by_unit["core"] + python
    most = {
        f"the {GPU}": 1 / by_unit[GPU],
        # Both directions at once.
        "PCIe": 1 / max(stage.seconds for stage in stages if stage.runs_on == "PCIe"),
        f"{cores} cores": cores / of_cores,
        "one service process's interpreter": 1 / python,
    }
    limit = min(most, key=lambda resource: most[resource])
    reached = min(rate, most[f"the {GPU}"], most["PCIe"])
    decoders = next(stage for stage in stages if stage.name == "decode").needed(reached)
    services, in_all = math.ceil(reached * python), math.ceil(reached * of_cores)
    return [
        f"{name}: " + ", ".join(f"{resource} {value:.0f}/s" for resource, value in most.items()) + ".",
        f"{name}: {limit} is the limit. {rate:.0f}/s take {math.ceil(rate * by_unit[GPU])} {GPU}.",
        f"{name}: {reached:.0f}/s on one {GPU}: service processes {services}, decoding processes "
        f"{math.ceil(decoders)}, cores for all of them {in_all}.",
    ]


def _show(found: Mapping[str, list[Stage]], lines: list[str], rate: float, described: dict[str, Any]) -> None:
    console = Console(width=150)
    for name, stages in found.items():
        console.print(f"\n{name}; needed for {rate:.0f}/s", highlight=False)
        for row in (HEADINGS, *(stage.cells(rate) for stage in stages)):
            console.print("  ".join(f"{cell:>20}" for cell in row), highlight=False)
    for line in (*lines, machine.line(described)):
        console.print(line, highlight=False)


def _write(
    chosen: argparse.Namespace, found: Mapping[str, list[Stage]], lines: list[str], described: dict[str, Any]
) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    tables = {
        name: [dict(zip(HEADINGS, stage.cells(chosen.rate), strict=True)) for stage in stages]
        for name, stages in found.items()
    }
    content = {
        "benchmark": "encoder_pipeline", "quick": chosen.quick, "rate": chosen.rate, "cores": chosen.cores,
        "tower_rate": chosen.tower_rate, "machine": described, "stages": tables, "verdict": lines,
    }  # fmt: skip
    (chosen.out / "encoder_pipeline.json").write_text(json.dumps(content, indent=1) + "\n")
    text = ["# Stages of the encoder service for one image", "", *machine.line(described).split("\n"), ""]
    text += [*(__doc__ or "").split("\n\n", 2)[2].strip().split("\n"), ""]
    for name, stages in found.items():
        text += [f"## {name}, needed for {chosen.rate:.0f}/s", ""]
        text += ["| " + " | ".join(HEADINGS) + " |", "|---|---|--:|--:|--:|"]
        text += ["| " + " | ".join(stage.cells(chosen.rate)) + " |" for stage in stages]
        text += [""]
    (chosen.out / "encoder_pipeline.md").write_text("\n".join([*text, *(f"- {line}" for line in lines), ""]))


if __name__ == "__main__":
    sys.exit(main())
