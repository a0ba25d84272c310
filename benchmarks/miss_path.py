"""Cost of cornplug where nothing is shared: throughput and time to first token.

    python benchmarks/miss_path.py [--quick] [--out DIR]

A stock and a cornplug engine answer the same requests, all of them new to both, in
blocks that alternate between them. The store runs and takes all saves; the encoder
service is configured and absent, so each engine runs its own tower. One series mixes text
and images, the other is text only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
from driver import models
from driver.requests import Load, Request, images, run, words
from driver.stage import SGLANG, VLLM, Idle, Pair, Stage, hits, options, stage
from driver.table import Report, Row

from devkit.processes import cpu_s

THROUGHPUT, TTFT = 0.97, 1.03
_CONCURRENCY = 4
_LLM = {"hidden_size": 768, "layers": 8, "heads": 12}
_CLIP = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "image_size": 224,
    "patch_size": 14,
    "projection_dim": 256,
}
_QWEN2_VISION = {"depth": 8, "embed_dim": 384, "num_heads": 6, "mlp_ratio": 4}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")
# SGLang 0.5.23 does not load LLaVA-1.5 as it is published.
_FAMILY = {VLLM: "LLaVA, 256 rows an image", SGLANG: "Qwen2-VL, 64 rows an image"}
_SGLANG_FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8")


def main(engine: str = VLLM) -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    report = Report(
        name="miss_path" if engine == VLLM else f"miss_path_{engine.lower()}",
        title="Nothing shared: what cornplug costs",
        engine=engine,
        quick=chosen.quick,
        set_up=[
            f"{_FAMILY[engine]}: LLM of 8 layers of 768, tower of 8 layers of 384, float32, random weights.",
            f"{_CONCURRENCY} requests at a time, 16 tokens answered; mixed: every other one has an image of "
            "its own and 100 tokens of text, the rest 300 tokens of text.",
            "Every prompt and image is new to both engines; both get the same ones in the same order, in "
            "blocks, one engine after the other, the order changing with each block.",
            "The store runs and receives every page and embedding; the encoder service is configured "
            "but absent. Figures are one a block, ratios are of the two blocks with equal requests.",
        ],
    )
    blocks, size = (4, 12) if chosen.quick else (10, 12)
    with stage(flags=_FLAGS, kv_gib=1, sglang_flags=_SGLANG_FLAGS) as here, here.store("1GiB"):
        measure(report, here, model(engine), blocks, size, engine)
    report.show()
    report.write(chosen.out)
    return 0


def model(engine: str) -> Path:
    """A checkpoint that the engine serves."""
    if engine == VLLM:
        return models.llava(**_LLM, vision=_CLIP)
    return models.qwen2_vl(**_LLM, vision=_QWEN2_VISION)


def mixed_requests() -> Iterator[Request]:
    """An image with a little text, and text alone, in turns; never one twice."""
    seen = images(224)
    for i in count():
        yield Request(words(100, 2 * i), (next(seen),), 16)
        yield Request(words(300, 2 * i + 1), (), 16)


def text_requests() -> Iterator[Request]:
    """Text alone; never one twice."""
    for i in count(1_000_000):
        yield Request(words(300, i), (), 16)


def measure(report: Report, here: Stage, checkpoint: Path, blocks: int, size: int, engine: str) -> None:
    """Fill `report` with both series."""
    with here.pair(checkpoint, "miss", engine) as pair:
        idle = Idle(pair)
        for name, requests in (("mixed", mixed_requests()), ("text only", text_requests())):
            for server in (pair.stock, pair.cornplug):  # warm up, each with requests of its own
                run(server, [next(requests) for _ in range(8)], _CONCURRENCY)
            report.rows += series(name, requests, pair, blocks, size, idle)
        found = hits(pair.cornplug, "kv_page") + hits(pair.cornplug, "embedding")
        saved = {
            what: int(pair.cornplug.metric("cornplug_saves_total", kind=what, outcome="stored"))
            for what in ("kv_page", "embedding")
        }
    if found.total() or not all(saved.values()):
        raise SystemExit(f"hits {dict(found)}, saves {saved}: this was not the miss path")
    report.facts["saved to the store meanwhile"] = ", ".join(f"{n} {what}s" for what, n in saved.items())
    report.facts["used by the engine that waits"] = str(idle)


def series(
    name: str, requests: Iterator[Request], pair: Pair, blocks: int, size: int, idle: Idle
) -> list[Row]:
    """The rows of `blocks` pairs of blocks of `size` requests."""
    loads: dict[str, list[Load]] = {"stock": [], "cornplug": []}
    used: dict[str, list[float]] = {"stock": [], "cornplug": []}
    sides = {pair.stock: "stock", pair.cornplug: "cornplug"}
    for i in range(blocks):
        block = [next(requests) for _ in range(size)]
        for server, other in zip(pair.in_turn(i), reversed(pair.in_turn(i)), strict=True):
            before = cpu_s(server)
            with idle.watch(other):
                loads[sides[server]].append(run(server, block, _CONCURRENCY))
            used[sides[server]].append((cpu_s(server) - before) / size)

    def row(figure: str, unit: str, of: str, target: float | None, better: str = "lower") -> Row:
        values = {side: [_figure(load, of) for load in loads[side]] for side in loads}
        return Row(
            name=f"{name}: {figure}", unit=unit, stock=values["stock"], cornplug=values["cornplug"],
            target=target, better="higher" if better == "higher" else "lower",
        )  # fmt: skip

    return [
        row("throughput", "requests/s", "requests_per_s", THROUGHPUT, "higher"),
        row("throughput", "tokens/s", "tokens_per_s", THROUGHPUT, "higher"),
        row("TTFT p50", "s", "p50", TTFT),
        row("TTFT p95", "s", "p95", TTFT),
        Row(
            name=f"{name}: CPU of the engine",
            unit="s/request",
            stock=used["stock"],
            cornplug=used["cornplug"],
        ),
    ]


def _figure(load: Load, of: str) -> float:
    if of in ("p50", "p95"):
        return float(np.quantile([answer.ttft_s for answer in load.answers], int(of[1:]) / 100))
    return float(getattr(load, of))


if __name__ == "__main__":
    sys.exit(main())
