"""Images a second of a mixed stream from three apps: the encoder service against transformers.

    python benchmarks/encoder_throughput.py [--quick] [--out DIR]

Both sides get files, decode, preprocess, and give the embedding that the language model consumes,
with equal weights and dtype on the same cores, in turns. The other side is transformers at its
best: as many of torch's threads as it is faster with, SDPA, inference mode, one request after another.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from driver import models
from driver.encoder_stream import Ask, Transformers, ask_service, stream
from driver.stage import options
from driver.table import Report, Row

from devkit.checkpoints import CLIP_L_336
from devkit.engines import EncoderProcess, StoreProcess
from devkit.processes import cpu_s

TARGET = 1.5
REPEATED = 0.3
_CORES = len(os.sched_getaffinity(0))
_CLIP = {**CLIP_L_336, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_CLIP |= {"num_hidden_layers": 8}
_QWEN = {"depth": 8, "embed_dim": 640, "num_heads": 10, "mlp_ratio": 4}
_LLM = {"hidden_size": 256, "layers": 1, "heads": 4}


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    report = Report(
        name="encoder_throughput",
        title="Mixed stream from three apps: images a second",
        quick=chosen.quick,
        engine="transformers",
        set_up=[
            "App A and B: LLaVA with language models of their own over one CLIP of 8 layers of 768 at 336 "
            "pixels (577 positions); app C: Qwen2-VL of 8 layers of 640, images of 0.05 to 0.5 megapixels.",
            "bfloat16, random weights; JPEG or PNG files in, embeddings out; equal numbers from each app.",
            f"Service: a process of its own with a replica a core ({_CORES}), asked by HTTP on this machine; "
            "its client's time counts too.",
            "transformers: get_image_features of the same checkpoints, one request after another, torch with "
            f"1 or {_CORES} threads, whichever was faster, SDPA, inference mode. It runs CLIP's last layer, "
            "which LLaVA does not use.",
            f'"{REPEATED:.0%} repeated": so many requests are for an image that was asked about before, '
            "by the same app or by the other LLaVA.",
        ],
    )
    served = [
        models.llava(**_LLM, vision=_CLIP, llm_seed=1, dtype="bfloat16"),
        models.llava(**{**_LLM, "hidden_size": 384, "heads": 6}, vision=_CLIP, llm_seed=2, dtype="bfloat16"),
        models.qwen2_vl(**_LLM, vision=_QWEN, max_pixels=28 * 28 * 640, dtype="bfloat16"),
    ]
    measure(report, served, rounds=2 if chosen.quick else 4, each=4 if chosen.quick else 6)
    report.show()
    report.write(chosen.out)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Time that one side needed for one stream."""

    seconds: float
    cpu_s: float
    """Of all its processes, the client's too."""
    made: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Sides:
    """transformers in this process, and the service beside it."""

    reference: Transformers
    service: EncoderProcess

    def pair(self, asks: list[Ask], number: int) -> tuple[Side, Side]:
        """Both, in an order that changes with each round."""
        if number % 2:
            return self._alone(asks), self._service(asks)
        service = self._service(asks)
        return self._alone(asks), service

    def _alone(self, asks: list[Ask]) -> Side:
        began, used = time.perf_counter(), time.process_time()
        made = [self.reference.embed(ask) for ask in asks]
        return Side(seconds=time.perf_counter() - began, cpu_s=time.process_time() - used, made=made)

    def _service(self, asks: list[Ask]) -> Side:
        began, used = time.perf_counter(), time.process_time() + cpu_s(self.service)
        made = ask_service(self.service.url, asks)
        now = time.process_time() + cpu_s(self.service)
        return Side(seconds=time.perf_counter() - began, cpu_s=now - used, made=made)


def measure(report: Report, served: list[Path], *, rounds: int, each: int) -> None:
    """Fill `report`: `rounds` pairs of each kind of stream, of `each` images an app."""
    reference = Transformers(served)
    threads = reference.choose_threads(stream(served, 1, 0.0, seed=-2), (1, _CORES))
    report.facts["torch's threads that transformers was faster with"] = threads
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as name:
        folder = Path(name)
        env = {
            "CORNPLUG_STORE_SECRET_FILE": str(folder / "secret"),
            "CORNPLUG_STORE_SOCKET": str(folder / "store.sock"),
        }
        with (
            StoreProcess(folder / "store.sock", size="512MiB", env=env),
            EncoderProcess(
                served, "--replicas", str(_CORES), "--device", "cpu",
                socket=folder / "encoder.sock", dtype="bfloat16", env=env, ready_s=600,
            ) as service,
        ):  # fmt: skip
            sides = Sides(reference, service)
            worst = 0.0
            for repeated in (0.0, REPEATED):
                streams = [stream(served, each, repeated, seed=r) for r in range(-1, rounds)]
                pairs = [sides.pair(asks, r) for r, asks in enumerate(streams)]
                worst = max(worst, *(_difference(*pair) for pair in pairs))
                # The first was for warming up.
                report.rows += _rows(pairs[1:], 3 * each, repeated)
            report.facts["tower passes of the service"] = service.tower_passes()
    report.facts["images that the service was asked for"] = 2 * (rounds + 1) * 3 * each
    report.facts["largest difference of an embedding, of its norm"] = f"{worst:.4f} (bfloat16)"


def _rows(pairs: list[tuple[Side, Side]], images: int, repeated: float) -> list[Row]:
    name = f"{repeated:.0%} repeated" if repeated else "no image twice"
    return [
        Row(
            name=name,
            unit="images/s",
            stock=[images / alone.seconds for alone, _ in pairs],
            cornplug=[images / service.seconds for _, service in pairs],
            target=None if repeated else TARGET,
            better="higher",
        ),
        Row(
            name=f"{name}, CPU time",
            unit="s an image",
            stock=[alone.cpu_s / images for alone, _ in pairs],
            cornplug=[service.cpu_s / images for _, service in pairs],
        ),
    ]


def _difference(alone: Side, service: Side) -> float:
    """The largest of any embedding, relative to its norm."""
    both = zip(alone.made, service.made, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in both)


if __name__ == "__main__":
    sys.exit(main())
