"""Cost of asking the store to a SGLang request that shares nothing, while others decode.

    python benchmarks/ttft_beside_decodes.py [--quick] [--out DIR]

A request that SGLang looks up in its storage misses the batch that is being made, unless the answer
is there at once: beside running decodes that is one more decode step. So prompts below a page, which
are never looked up, and prompts above it are asked in turns of one server, and the ratio of the two is
compared between stock and cornplug: other load on the machine meets both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
from driver import models
from driver.requests import Request, words
from driver.stage import SGLANG, Pair, hits, options, stage
from driver.table import Report, Row

from devkit.engines import EngineServer

TARGET = 1.03
_PAGE = 64
_BELOW, _ABOVE = 38, 85
"""Tokens of text; the chat template adds some 15."""
_DECODES = 2
_LLM = {"hidden_size": 768, "layers": 8, "heads": 12}
_VISION = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}
_FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8")


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    report = Report(
        name="ttft_beside_decodes",
        title="Nothing shared, two requests decoding: what a lookup costs the next one",
        engine=SGLANG,
        quick=chosen.quick,
        set_up=[
            "LLM of 8 layers of 768, float32, random weights; pages of 64 tokens with cornplug.",
            f"{_DECODES} requests decode all the time; prompts of some {_BELOW + 15} tokens, which are below "
            f"a page and never looked up, and of some {_ABOVE + 15} tokens are asked in turns, each one new.",
            "A sample is one block: the median of its prompts. Blocks alternate between the engines.",
        ],
    )
    blocks, size = (4, 8) if chosen.quick else (10, 10)
    checkpoint = models.qwen2_vl(**_LLM, vision=_VISION)
    with (
        stage(flags=(), kv_gib=1, sglang_flags=_FLAGS) as here,
        here.store("1GiB"),
        here.pair(checkpoint, "ttft", SGLANG) as pair,
    ):
        measure(report, pair, blocks, size)
    report.show()
    report.write(chosen.out)
    return 0


def measure(report: Report, pair: Pair, blocks: int, size: int) -> None:
    """Fill `report`."""
    seeds = count()
    below: dict[EngineServer, list[float]] = {pair.stock: [], pair.cornplug: []}
    above: dict[EngineServer, list[float]] = {pair.stock: [], pair.cornplug: []}
    for server in (pair.stock, pair.cornplug):
        with decoding(server, seeds):
            ttfts(server, seeds, 3)
    for i in range(blocks):
        for server in pair.in_turn(i):
            with decoding(server, seeds):
                short, long = ttfts(server, seeds, size)
            below[server].append(short)
            above[server].append(long)
    if found := hits(pair.cornplug, "kv_page").total():
        raise SystemExit(f"{found} hits: this was not the miss path")
    if not pair.cornplug.metric("cornplug_misses_total", kind="kv_page", reason="absent"):
        raise SystemExit("nothing was looked up")

    def row(name: str, unit: str, values: dict[EngineServer, list[float]], target: float | None) -> Row:
        return Row(
            name=name, unit=unit, stock=values[pair.stock], cornplug=values[pair.cornplug], target=target
        )

    both = {server: list(np.asarray(above[server]) / np.asarray(below[server])) for server in above}
    report.rows = [
        row("TTFT above a page / below it", "ratio", both, TARGET),
        row("TTFT above a page", "s", above, None),
        row("TTFT below a page", "s", below, None),
    ]


def ttfts(server: EngineServer, seeds: Iterator[int], size: int) -> tuple[float, float]:
    """Medians of `size` prompts below a page and as many above it, in turns."""
    found: dict[int, list[float]] = {_BELOW: [], _ABOVE: []}
    for _ in range(size):
        for tokens in found:
            answer = Request(words(tokens, next(seeds)), (), 1).ask(server)
            if (answer.prompt_tokens < _PAGE) is not (tokens == _BELOW):
                raise SystemExit(f"a prompt of {answer.prompt_tokens} tokens for one of {tokens}")
            found[tokens].append(answer.ttft_s)
    return float(np.median(found[_BELOW])), float(np.median(found[_ABOVE]))


@contextmanager
def decoding(server: EngineServer, seeds: Iterator[int]) -> Iterator[None]:
    """While `_DECODES` requests decode, one after the other in each place; below a page, too."""
    end = threading.Event()
    prompts = [words(10, next(seeds)) for _ in range(_DECODES)]

    def decode(prompt: str) -> None:
        while not end.is_set():
            Request(prompt, (), 40).ask(server)

    threads = [threading.Thread(target=decode, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
