"""Serving images of which most were served before: stock vLLM, its own EC connector, and cornplug.

    python benchmarks/repeated_images.py [--quick] [--out DIR]

In each round an app of every side answers questions about images and is stopped. Then a fresh engine of that
side, a second app, serves 80 % of those images and 20 % new ones, with questions of its own: first as many at
a time as it takes, then as they come (Poisson) at 0.8 of a stock engine's rate. The sides follow one another
in random order. `vllm bench serve` with its data set custom_image sends the requests and measures. Its data
set random-mm cannot repeat an image.
"""

from __future__ import annotations

import io
import json
import random
import sys
from base64 import b64encode
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from driver import models
from driver.bench_serving import Served, vllm_bench_serve
from driver.requests import words
from driver.stage import Stage, hits, options, stage
from driver.table import Report, Row
from PIL import Image

from devkit.engines import EngineServer, VllmServer, photos

THROUGHPUT, TTFT = 1.30, 0.50
STOCK, CORNPLUG, NATIVE = "stock", "cornplug", "ECExampleConnector"
_REPEATED: Final = 0.8
_LOAD: Final = 0.8
_ANSWER_TOKENS: Final = 16
_CONCURRENCY: Final = 6  # for 4 seats
_SIZES: Final = ((308, 224), (224, 308), (280, 280), (448, 252), (252, 448), (448, 336), (336, 448))
"""Pixels (width, height). The shapes are those of photos, screens and phones, as in VisionArena, with
edges of about a third of theirs, because the tower runs on a CPU."""
_FLAGS: Final = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
_LLM: Final = {"hidden_size": 768, "layers": 8, "heads": 12}
_VISION: Final = {"depth": 8, "embed_dim": 512, "num_heads": 8, "mlp_ratio": 4, "patch_size": 14}
"""With this LLM the tower takes about 60 % of a request's arithmetic, as in Qwen2-VL-2B."""


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    rounds, size = (1, 5) if chosen.quick else (5, 15)
    report = Report(
        name="repeated_images",
        title="Serving images of which 80 % were served before",
        quick=chosen.quick,
        set_up=[
            "Qwen2-VL with a tower of 8 layers of 512 and an LLM of 8 layers of 768, float32, random "
            "weights; one image of 68,992 to 150,528 pixels and a question of 32 tokens a request, "
            f"{_ANSWER_TOKENS} tokens answered; the client is `vllm bench serve`, custom_image.",
            f"{rounds} rounds. In each, an app of every side answered about the repeated images and was "
            "stopped; then a fresh engine of every side, one after the other in random order.",
            f"Saturated: {_CONCURRENCY} at a time for 4 seats. Open: Poisson arrivals at {_LOAD} of the rate "
            f"of a stock engine that is measured first. {size} requests each, {_REPEATED:.0%} repeated.",
            "ECExampleConnector is vLLM's connector for embeddings that needs no GPU; it keeps them in "
            "files. cornplug keeps them in its store, without an encoder service.",
        ],
    )
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with stage(flags=_FLAGS, kv_gib=1) as here, here.store("2GiB"):
        model = models.qwen2_vl(**_LLM, vision=_VISION, max_pixels=28 * 28 * 256)
        sides = _Sides(here, model)
        with sides.start(STOCK, "rate") as server:
            load = _Load(here.folder, model, 0, size)
            load.warm_up(server)
            rate = _LOAD * load.serve(server, "saturated").requests_per_s
        for number in range(1, rounds + 1):
            load = _Load(here.folder, model, number, size)
            for side in random.Random(number).sample((STOCK, NATIVE, CORNPLUG), 3):
                found[side].append(_measured(sides, side, load, rate))
    for figure, unit, target, better in (
        ("saturated", "requests/s", THROUGHPUT, "higher"),
        ("TTFT p50, open", "s", TTFT, "lower"),
        ("TTFT p95, open", "s", None, "lower"),
    ):
        of = {side: [each[figure] for each in figures] for side, figures in found.items()}
        report.rows.append(
            Row(
                name=figure,
                unit=unit,
                stock=of[STOCK],
                cornplug=of[CORNPLUG],
                target=target,
                better="higher" if better == "higher" else "lower",
            )
        )
        native = np.asarray(of[NATIVE])
        report.facts[f"{figure}, {NATIVE}"] = (
            f"{np.median(native):.3f} {unit}, {np.median(native / np.asarray(of[STOCK])):.3f} of stock; "
            f"cornplug {np.median(np.asarray(of[CORNPLUG]) / native):.3f} of it"
        )
    shared = sum(int(each["from the store"]) for each in found[CORNPLUG])
    expected = rounds * 2 * round(_REPEATED * size)
    report.facts["embeddings from the store"] = f"{shared} of {expected} repeated"
    if shared < 0.9 * expected:
        raise SystemExit(f"not the case to measure: {report.facts}")
    report.facts["arrivals"] = f"{rate:.2f} requests/s"
    report.show()
    report.write(chosen.out)
    return 0


@dataclass(frozen=True)
class _Sides:
    """Starts the engines of each side."""

    here: Stage
    model: Path

    def start(self, side: str, app: str) -> EngineServer:
        """An engine of a side that has served nothing."""
        flags: tuple[str, ...] = ()
        if side == CORNPLUG:
            flags = (
                "--kv-connector", "cornplug", "--cornplug-app", app,
                "--cornplug-store", str(self.here.store_socket),
            )  # fmt: skip
        elif side == NATIVE:
            folder = self.here.folder / "embeddings"
            folder.mkdir(exist_ok=True)
            config = {
                "ec_connector": NATIVE, "ec_role": "ec_both",
                "ec_connector_extra_config": {"shared_storage_path": str(folder)},
            }  # fmt: skip
            flags = ("--ec-transfer-config", json.dumps(config))
        return VllmServer(self.model, *_FLAGS, *flags, **self.here.options(f"{side}-{app}"))


def _measured(sides: _Sides, side: str, load: _Load, rate: float) -> dict[str, float]:
    """Figures of a second app of this side."""
    if side != STOCK:  # A stock engine that is stopped leaves nothing.
        with sides.start(side, "first") as server:
            load.serve(server, "first app")
            if side == CORNPLUG:
                hits(server, "embedding")
    with sides.start(side, "second") as server:
        load.warm_up(server)
        before = hits(server, "embedding").total() if side == CORNPLUG else 0
        full = load.serve(server, "saturated")
        opened = load.serve(server, "open", rate=rate)
        return {
            "saturated": full.requests_per_s,
            "TTFT p50, open": float(np.quantile(opened.ttft_s, 0.5)),
            "TTFT p95, open": float(np.quantile(opened.ttft_s, 0.95)),
            "from the store": hits(server, "embedding").total() - before if side == CORNPLUG else 0,
        }


class _Load:
    """The files and requests of one round, the same for every side."""

    def __init__(self, folder: Path, model: Path, number: int, size: int) -> None:
        self._folder, self._model = folder, model
        repeated = round(_REPEATED * size)
        self._data = {
            part: self._write(part, number, [f"{part}-{i}" for i in range(size)])
            for part in ("saturated", "open")
        }
        first = [f"{part}-{i}" for part in self._data for i in range(repeated)]
        self._data["first app"] = self._write("first app", number, first)
        self._data["warm-up"] = self._write("warm-up", number, [f"warm-up-{i}" for i in range(3)])

    def warm_up(self, server: EngineServer) -> None:
        """Have two images served that are in no measurement."""
        self.serve(server, "warm-up")

    def serve(self, server: EngineServer, part: str, *, rate: float = float("inf")) -> Served:
        """Figures of vLLM's client for one file of requests."""
        data, count = self._data[part]
        load = [
            "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
            "--dataset-name", "custom_image", "--dataset-path", str(data), "--num-prompts", str(count),
            "--custom-output-len", str(_ANSWER_TOKENS), "--request-rate", str(rate),
        ]  # fmt: skip
        if rate == float("inf"):
            load += ["--max-concurrency", str(_CONCURRENCY)]
        return vllm_bench_serve(server, self._model, self._folder, load)

    def _write(self, part: str, number: int, names: Sequence[str]) -> tuple[Path, int]:
        """Write a data set whose images have these names. An image of one name is the same in all files of
        a round, and new in every round."""
        lines: list[dict[str, Any]] = []
        for name in names:
            image = b64encode(_image(f"{number} {name}")).decode()
            question = words(32, random.Random(f"{number} {part} {name}").randrange(10**6))
            lines.append({"prompt": question, "image_files": [f"data:image/png;base64,{image}"]})
        data = self._folder / f"{number}-{part.replace(' ', '-')}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return data, len(lines)


def _image(seed: str) -> bytes:
    """A PNG of one of the sizes, cut from a photograph at a place that depends on the seed."""
    rng = random.Random(seed)
    width, height = rng.choice(_SIZES)
    photo = rng.choice(photos())
    out = io.BytesIO()
    with Image.open(io.BytesIO(photo.data)) as whole:
        scale = max(width / whole.width, height / whole.height) * rng.uniform(1.05, 1.5)
        larger = whole.convert("RGB").resize((int(whole.width * scale) + 1, int(whole.height * scale) + 1))
        left, top = rng.randint(0, larger.width - width), rng.randint(0, larger.height - height)
        larger.crop((left, top, left + width, top + height)).save(out, "PNG", compress_level=1)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
