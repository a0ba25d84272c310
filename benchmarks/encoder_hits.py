"""CPU of a request for a cached image: processor first, as before, against store first.

    python benchmarks/encoder_hits.py [--quick] [--out DIR]

JPEGs of 1280 x 960 pixels to `/v1/encode` (multipart, `inline=false`), in this process, without a socket. CPU
of all threads but the one that asks, and of decoding processes, from the ASGI call to the end of its answer.
Sides take turns, so that each finds the other's data in the cores' caches.

"same file" was sent before; "same pixels" is another file of cached pixels. "before": every file is decoded
and preprocessed, and then the store is asked. "after": the store is asked after the digest of the file, and
again after that of its pixels. "of it decoding" is the part of "after" that decoding processes take. "same
file, without HTTP" is the part from the file's bytes to the answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import machine
import numpy as np
from driver import models
from driver.asgi_service import form, jpeg, others_s, post, process_s, running_loop
from driver.stage import options
from rich.console import Console

from cornplug.config import EncoderConfig
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, MediaSource
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.qos import DEFAULT_CLASS, QosCaller
from cornplug.store.memory import MemoryStore
from devkit.checkpoints import CLIP_L_336

TOWER: Final = {
    **CLIP_L_336,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SECRET: Final = b"s" * 32
WIDTH, HEIGHT = 1280, 960
FILE: Final = "same file"
TARGET_MS: Final = {FILE: 1.0, "same pixels": 8.0}
HEADINGS: Final = (
    "model", "request", "before, ms", "after, ms", "of it decoding", "target, ms", "verdict", "n"
)  # fmt: skip


class ProcessorFirst(EncoderCore):
    """The service as it was: the store is asked once a medium is preprocessed."""

    def reply_from_cache(
        self, request: EncodeRequest, *, inline: bool, caller: QosCaller
    ) -> EncodeReply | None:
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one request, in milliseconds."""

    service: float
    decoding: float = 0.0

    @property
    def whole(self) -> float:
        return self.service + self.decoding


@dataclass(frozen=True, slots=True)
class Side:
    """One service of this process."""

    encoder: EncoderCore
    app: Any
    loop: asyncio.AbstractEventLoop

    def request(self, model: str, image: bytes) -> tuple[Cost, str]:
        """The cost of one request, and its answer's origin. Exits on a refusal."""
        body = form({"model": model.encode(), "inline": b"false"}, image)
        decoders, began = self._decoders_s(), others_s()
        status, answer = asyncio.run_coroutine_threadsafe(post(self.app, body), self.loop).result()
        service = others_s() - began
        cost = Cost(1e3 * service, 1e3 * (self._decoders_s() - decoders))
        if status != 200:
            sys.exit(f"refused: {answer!r}")
        return cost, json.loads(answer)["origin"]

    def recalls(self, model: str, rounds: int) -> list[Cost]:
        """The cost of each lookup of a file that `request` sent: digest, store, counted answer."""
        preparer = MediaPreparer(self.encoder.registry, secret=SECRET, limits=MediaLimits())
        data, caller = _jpeg(b"first"), QosCaller(qos=DEFAULT_CLASS)
        source = MediaSource(model=model, modality="image", contents=[data], salt=None, deadline_s=10.0)
        preparer.prepare(source)
        took = []
        for _ in range(rounds):
            began = time.process_time()
            known = preparer.open(source).look_up_cached(
                lambda request: self.encoder.reply_from_cache(request, inline=False, caller=caller)
            )
            took.append(Cost(1e3 * (time.process_time() - began)))
            if known is None:
                sys.exit("a file that was sent is not known")
        return took

    def _decoders_s(self) -> float:
        lanes = self.encoder.decode_lanes
        return sum(map(process_s, lanes.process_ids())) if lanes is not None else 0.0


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    rounds = 20 if chosen.quick else 100
    described = machine.describe()
    table: list[list[str]] = []
    served = {
        "LLaVA, 336 x 336": models.llava(vision=TOWER, hidden_size=64, layers=1),
        "Qwen2-VL, 4,784 patches": models.qwen2_vl(max_pixels=28 * 28 * 16384),
    }
    with ExitStack() as running:
        loop = running.enter_context(running_loop())
        registry = ModelRegistry.open([str(path) for path in served.values()], dtype="float32", device="cpu")
        before = running.enter_context(_service(ProcessorFirst, registry, loop, remembered_files=0))
        after = running.enter_context(_service(EncoderCore, registry, loop, remembered_files=1000))
        for name, path in served.items():
            for request in TARGET_MS:
                took = _measure(before, after, str(path), request, rounds)
                table.append(_row(name, request, *took))
            table.append(_row(name, f"{FILE}, without HTTP", [], after.recalls(str(path), rounds)))
    _show(table, described)
    _write(chosen.out, table, described, quick=chosen.quick)
    return 0


def _measure(
    before: Side, after: Side, model: str, request: str, rounds: int
) -> tuple[list[Cost], list[Cost]]:
    """The cost of each request, by side; each pair asks for the same file."""
    for side in (before, after):  # encodes, and starts threads and decoders
        for _ in range(4):
            side.request(model, _jpeg(b"first"))
    took: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(rounds):
        comment = b"first" if request == FILE else f"{model} {request} {number}".encode()
        sides = list(zip((before, after), took, strict=True))
        for side, mine in sides if number % 2 else sides[::-1]:
            cost, origin = side.request(model, _jpeg(comment))
            if origin != "cached":
                sys.exit(f"{request}: {origin}, so no hit was measured")
            mine.append(cost)
    return took


def _row(model: str, request: str, before: list[Cost], after: list[Cost]) -> list[str]:
    target = TARGET_MS[request.partition(",")[0]]
    verdict = "met" if np.median([cost.whole for cost in after]) <= target else "missed"
    decoding = f"{np.median([cost.decoding for cost in after]):.2f}"
    return [
        model,
        request,
        _spread(before),
        _spread(after),
        decoding,
        f"<= {target:g}",
        verdict,
        str(len(after)),
    ]


def _spread(costs: list[Cost]) -> str:
    if not costs:
        return "-"
    low, middle, high = np.quantile([cost.whole for cost in costs], (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@contextmanager
def _service(
    kind: type[EncoderCore],
    registry: ModelRegistry,
    loop: asyncio.AbstractEventLoop,
    *,
    remembered_files: int,
) -> Iterator[Side]:
    cache = ResultCache(MemoryStore(capacity_bytes=64 << 20).connect(), deadline_s=1.0)
    encoder = kind(registry, cache, secret=SECRET)
    config = EncoderConfig(port=0, prepare_threads=1)
    preparer = partial(MediaPreparer, max_cached_files=remembered_files)
    with mock.patch("cornplug.encoder_service.http.app.MediaPreparer", preparer):
        app = create_app(encoder, config, secret=SECRET, drain_state=DrainState())
    encoder.start_decoding()
    try:
        yield Side(encoder, app, loop)
    finally:
        encoder.close()


def _jpeg(comment: bytes) -> bytes:
    return jpeg(WIDTH, HEIGHT, comment=comment)


def _show(table: list[list[str]], described: dict[str, Any]) -> None:
    console = Console(width=150)
    for row in (HEADINGS, *table):
        console.print("  ".join(f"{cell:>24}" for cell in row), highlight=False)
    console.print(f"CPU; medians (quartiles); file of {len(_jpeg(b'first')) / 1024:.0f} KiB", highlight=False)
    console.print(machine.line(described), highlight=False)


def _write(folder: Path, table: list[list[str]], described: dict[str, Any], *, quick: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(HEADINGS, row, strict=True)) for row in table]
    content = {"benchmark": "encoder_hits", "quick": quick, "machine": described, "rows": rows}
    (folder / "encoder_hits.json").write_text(json.dumps(content, indent=1) + "\n")
    command = f"`python benchmarks/encoder_hits.py{' --quick' if quick else ''}`"
    lines = [
        "# CPU of a request for a cached image",
        "",
        command,
        "",
        *machine.line(described).split("\n"),
        "",
    ]
    lines += [*(__doc__ or "").split("\n\n", 2)[2].strip().split("\n"), ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|---|---|--:|--:|--:|--:|---|--:|"]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    (folder / "encoder_hits.md").write_text("\n".join([*lines, "", "Medians (quartiles).", ""]))


if __name__ == "__main__":
    sys.exit(main())
