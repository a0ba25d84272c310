"""Images a second of a tower in the service's form, beside transformers' own, and beside a plain matmul.

    python benchmarks/tower_throughput.py [--quick] [--device cuda] [--dtype bfloat16] [--compile] [--out DIR]

Both sides load one checkpoint with random weights and turn the same processor outputs, in the
host's memory, into embeddings on the device. transformers takes one image at a time, as an app does
that calls `get_image_features`; the service's tower and projector take them in batches. The
cost of preprocessing is left out: in the service it overlaps with the tower.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final
from unittest import mock

import machine
import torch
import transformers
from driver import models
from driver.table import Report, Row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.encoder_service.model_loader import CompiledTower
from cornplug.encoder_service.towers import varlen_attention
from cornplug.encoder_service.towers.base import Projector, Tower, TowerItem, float_dtype
from devkit.checkpoints import CLIP_L_336, QWEN2_5_VISION

TIMES_NAIVE: Final = 3.0
OF_CEILING: Final = 0.5
_LLM: Final = {"hidden_size": 2048, "layers": 1, "heads": 16, "intermediate_size": 256}
_GRIDS: Final = ((26, 34), (46, 74), (32, 24), (54, 36), (18, 26), (64, 64))
"""Patches down and across of images from 364 x 252 to 896 x 896 pixels, mixed."""
_SMALL_GRIDS: Final = ((16, 22), (26, 18), (12, 26))
"""For the CPU: 168 x 364 to 364 x 252 pixels."""

Image = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    device: torch.device
    dtype: torch.dtype
    depth: int | None
    """Layers of each tower; None as published."""
    images: int
    batch: int
    rounds: int
    matmul: int
    """Rows and columns of the matmul that is the ceiling."""
    compile: bool
    quick: bool
    out: Path

    @classmethod
    def parse(cls) -> Options:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--device", default="cpu", help="torch's name (default: cpu)")
        parser.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 elsewhere")
        parser.add_argument("--compile", action="store_true", help="torch.compile the service's tower")
        parser.add_argument("--quick", action="store_true", help="fewer layers, images and rounds")
        parser.add_argument("--depth", type=int, help="layers (default: all on CUDA; 8 on the CPU, quick 3)")
        parser.add_argument("--images", type=int, help="a round (default: 96 on CUDA; 6; quick 32; 3)")
        parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
        args = parser.parse_args()
        cuda = args.device.startswith("cuda")
        usual = {(True, False): 96, (True, True): 32, (False, False): 6, (False, True): 3}
        images = args.images or usual[cuda, args.quick]
        return cls(
            device=torch.device(args.device),
            dtype=float_dtype(args.dtype or ("bfloat16" if cuda else "float32")),
            depth=args.depth or (None if cuda else 3 if args.quick else 8),
            images=images,
            batch=min(images, 64),
            rounds=3 if args.quick else 5,
            matmul=8192 if cuda else 1024,
            compile=args.compile,
            quick=args.quick,
            out=args.out,
        )


class Ours:
    """The two halves as the service runs them."""

    def __init__(self, path: Path, chosen: Options) -> None:
        checkpoint = Checkpoint.open(str(path))
        architecture = towers.find_architecture(checkpoint.family)
        self._plain: Tower = architecture.load_tower(checkpoint, chosen.dtype, chosen.device)
        self._projector: Projector = architecture.load_projector(checkpoint, chosen.dtype, chosen.device)
        self._batch = chosen.batch
        self._compile = chosen.compile
        self._tower = self._plain

    def items(self, images: Sequence[Image]) -> list[TowerItem]:
        return [self._plain.prepare({name: _wire(t) for name, t in one.items()}) for one in images]

    def flops(self, items: Sequence[TowerItem]) -> int:
        """Of one pass over these, counted operation by operation; then compiles the tower, if asked to.

        One image of each grid, and by plain matmuls: fused kernels hide theirs from the counter,
        and packing changes no count.
        """
        grids = Counter(item.digests[1:] for item in items)
        one_of = {item.digests[1:]: item for item in items}
        total = 0
        for grid, item in one_of.items():
            with (
                FlopCounterMode(display=False) as counted,
                sdpa_kernel(SDPBackend.MATH),
                mock.patch.object(varlen_attention, "attention", varlen_attention.batched_attention),
            ):
                self._projector.project(self._plain.encode([item]), [item])
            total += counted.get_total_flops() * grids[grid]
        if self._compile:
            self._tower = CompiledTower(self._plain)
        return total

    def run(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for first in range(0, len(items), self._batch):
            batch = items[first : first + self._batch]
            out += self._projector.project(self._tower.encode(batch), batch)
        return out


class Theirs:
    """transformers' model, one image at a time."""

    def __init__(self, path: Path, architecture: str, chosen: Options) -> None:
        cls = getattr(transformers, architecture)
        model = cls.from_pretrained(path, dtype=chosen.dtype, attn_implementation="sdpa")
        self._model = model.eval().to(chosen.device)
        self._device = chosen.device

    @torch.inference_mode()
    def run(self, images: Sequence[Image]) -> list[torch.Tensor]:
        return [self._one(image) for image in images]

    def _one(self, image: Image) -> torch.Tensor:
        inputs = {name: tensor.to(self._device) for name, tensor in image.items()}
        rows = self._model.get_image_features(**inputs).pooler_output
        return rows[0]


def clip_images(chosen: Options) -> Iterator[Image]:
    """Processor outputs of a 336-pixel CLIP."""
    for seed in range(chosen.images):
        yield {"pixel_values": _noise(seed, (1, 3, 336, 336), chosen)}


def qwen_images(chosen: Options) -> Iterator[Image]:
    """Processor outputs of images of mixed sizes."""
    grids = _SMALL_GRIDS if chosen.device.type == "cpu" else _GRIDS
    for seed, (h, w) in enumerate(islice(cycle(grids), chosen.images)):
        pixels = _noise(seed, (h * w, 3 * 2 * 14 * 14), chosen)
        yield {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, h, w]])}


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = Options.parse()
    clip, qwen = dict(CLIP_L_336), dict(QWEN2_5_VISION)
    cut: dict[str, Any] = {}
    if chosen.depth is not None:
        clip["num_hidden_layers"] = chosen.depth
        # transformers runs the layer behind the cut: 1 of 24, but a large part of a few.
        cut = {"config": {"vision_feature_layer": -1}}
        # As published: one block in so many sees whole frames, the last one does.
        qwen |= {"depth": chosen.depth, "fullatt_block_indexes": [chosen.depth - 1]}
    stored = dtype_name(chosen.dtype)
    report = Report(
        name="tower_throughput",
        title="Towers: images a second, and how much of the device's matmul they are",
        quick=chosen.quick,
        engine="transformers, or a plain matmul",
        machine=machine.describe(chosen.device),
        set_up=[
            f"CLIP-L/336: {clip['num_hidden_layers']} layers, cut {'after' if cut else 'before'} the last. "
            f"Qwen2.5-VL: {qwen['depth']} layers of 1280. {stored}, random weights, projectors included.",
            f"{chosen.images} images a round; the service's side in batches of {chosen.batch}"
            f"{', layers compiled' if chosen.compile else ''}; transformers one by one, with SDPA.",
            "From processor outputs in the host's memory to embeddings on the device, on both sides.",
            f"Matmul: {chosen.matmul} x {chosen.matmul}, {stored}, timed beside each round.",
        ],
    )
    small = {**_LLM, "dtype": stored}
    compare(report, "CLIP-L/336", models.llava(**small, **cut, vision=clip), clip_images, chosen)
    compare(report, "Qwen2.5-VL", models.qwen2_5_vl(**small, vision=qwen), qwen_images, chosen)
    report.show()
    report.write(chosen.out)
    return 0


def compare(
    report: Report, name: str, path: Path, make: Callable[[Options], Iterator[Image]], chosen: Options
) -> None:
    """Two rows of figures of one tower."""
    images = list(make(chosen))
    architecture = Checkpoint.open(str(path)).config["architectures"][0]
    ours, theirs = Ours(path, chosen), Theirs(path, architecture, chosen)
    items = ours.items(images)
    flops = ours.flops(items)
    report.facts[f"{name}: least cosine between the two sides' rows"] = _alike(
        ours.run(items), theirs.run(images)
    )
    naive, batched, achieved, ceiling = [], [], [], []
    for _ in range(chosen.rounds):
        naive.append(len(images) / _seconds(lambda: theirs.run(images), chosen.device))
        seconds = _seconds(lambda: ours.run(items), chosen.device)
        batched.append(len(images) / seconds)
        achieved.append(flops / seconds / 1e12)
        ceiling.append(_matmul_flops(chosen) / 1e12)
    cuda = chosen.device.type == "cuda"
    report.facts[f"{name}: GFLOP an image"] = round(flops / len(images) / 1e9, 1)
    report.rows += [
        Row(
            name=f"{name}: images a second, beside transformers",
            unit="1/s",
            stock=naive,
            cornplug=batched,
            target=TIMES_NAIVE if cuda else None,
            better="higher",
        ),
        Row(
            name=f"{name}: work done, beside a matmul",
            unit="TFLOP/s",
            stock=ceiling,
            cornplug=achieved,
            target=OF_CEILING if cuda else None,
            better="higher",
        ),
    ]


def _alike(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Nothing is timed unless both sides compute the same."""
    pairs = zip(ours, theirs, strict=True)
    least = min(
        float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).min()) for a, b in pairs
    )
    if least < 0.98:
        raise SystemExit(f"tower_throughput: the two sides differ, cosine {least:.4f}")
    return round(least, 5)


def _matmul_flops(chosen: Options) -> float:
    """FLOP/s of the fastest of some matmuls."""
    n = chosen.matmul
    a, b = (torch.randn(n, n, device=chosen.device, dtype=chosen.dtype) for _ in range(2))
    return 2 * n**3 / min(_seconds(lambda: a @ b, chosen.device) for _ in range(10))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _noise(seed: int, shape: tuple[int, ...], chosen: Options) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(chosen.dtype)


def _wire(tensor: torch.Tensor) -> WireTensor:
    return WireTensor(
        dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=bytes(raw_bytes(tensor))
    )


if __name__ == "__main__":
    raise SystemExit(main())
