"""What cornplug costs requests that gain nothing: a new image, and a prompt in the engine's own cache.

    python benchmarks/new_image.py [--quick] [--out DIR]

A stock engine and an engine with cornplug, an encoder service and a store run side by side. In each
round both engines, in random order, are asked about an image that neither has seen, and then
get the same prompt with other questions after random pauses. The stock engine runs its own tower,
the other engine asks the service. Repeated prompts come from each engine's own prefix cache.
Engines of one kind differ by several percent from start to start, so five pairs are measured.
The exit status is 1 if a bound is broken.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from driver import models
from driver.requests import Request, images, words
from driver.stage import Idle, Pair, compute_threads, hits, options, stage
from driver.table import Report, Row

from devkit.checkpoints import CLIP_L_336

RATIO, EXTRA_S = 1.10, 0.020
"""A request may take this multiple of the stock engine's time, plus this many seconds (median)."""
LATE_EXTRA_S = 0.050
"""The same for the 95th percentile of cached prompts, beside `RATIO`."""
_SMALL_CLIP = {**CLIP_L_336, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
               "num_attention_heads": 8}  # fmt: skip
_LLM = {"hidden_size": 384, "layers": 6, "heads": 6}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32")
_PREAMBLE_TOKENS = 300
_PAIRS, _ROUNDS = 5, 8
"""Pairs of engines, and rounds with each. --quick has one pair."""
_REPEATS = 3
_PAUSES_S = (0.0, 0.03, 0.06, 0.1, 0.2)
"""Before a repeat. Idle saves begin 0.05 s after the last token: repeats come before, during and after."""
_QUIET_S = 1.1
"""Before a new image. vLLM's workers poll without a pause for a second after their last request."""
STOCK, CORNPLUG = "stock", "cornplug"
Times = dict[str, list[float]]
NEW, CACHED = "TTFT, new image", "TTFT, prompt in the engine's own cache"


def main() -> int:
    """Measure, print and write. Returns 1 if a bound is broken."""
    chosen = options(__doc__)
    pairs = 1 if chosen.quick else _PAIRS
    report = Report(
        name="new_image",
        title="Nothing to gain: a new image, and a prompt in the engine's own cache",
        quick=chosen.quick,
        set_up=[
            f"Tower: {'CLIP of 12 layers of 512' if chosen.quick else 'CLIP-L/336 (24 layers of 1024)'}, 577 "
            "positions; language model: 6 layers of 384; float32, random weights.",
            "Stock and cornplug answer one request at a time, in random order; the other engine idles. Same "
            f"flags, and {compute_threads()} compute threads in each engine and in the service.",
            f"Each round has one new image, {_QUIET_S:g} s after the last request, and {_REPEATS} repeats of "
            f"its prompt with another question, each after a random pause of up to {max(_PAUSES_S):g} s.",
            f"Pairs of engines, each started in random order: {pairs}, with {_ROUNDS} rounds each.",
        ],
    )
    vision = _SMALL_CLIP if chosen.quick else dict(CLIP_L_336)
    model = models.llava(**_LLM, vision=vision)
    seen, rng = images(336), random.Random(1)
    measured = []
    with stage(flags=_FLAGS, kv_gib=1) as here, here.store("1GiB"), here.encoder(model):
        for _ in range(pairs):
            with here.pair(model, "new", cornplug_first=rng.random() < 0.5) as pair:
                measured.append(measure(report, pair, seen, rng))
    broken = judge(report, measured)
    report.show()
    report.write(chosen.out)
    for line in broken:
        print(f"BROKEN: {line}")
    return 1 if broken else 0


def measure(report: Report, pair: Pair, seen: Iterator[bytes], rng: random.Random) -> dict[str, Times]:
    """Seconds to the first token of this pair's requests: row -> side -> samples."""
    sides, idle = {STOCK: pair.stock, CORNPLUG: pair.cornplug}, Idle(pair)
    for i, image in enumerate(islice(seen, 2)):
        for server in sides.values():
            for question in ("warm up", "again"):
                Request(words(_PREAMBLE_TOKENS, 900 + i), (image,)).then(question).ask(server)
    before = hits(pair.cornplug, "embedding")
    times: dict[str, Times] = {row: {side: [] for side in sides} for row in (NEW, CACHED)}
    for i, image in enumerate(islice(seen, _ROUNDS)):
        prompt = Request(words(_PREAMBLE_TOKENS, i), (image,))
        for side in rng.sample(list(sides), 2):
            server = sides[side]
            time.sleep(_QUIET_S)
            with idle.watch(pair.cornplug if side == STOCK else pair.stock):
                times[NEW][side].append(prompt.then("what is new").ask(server).ttft_s)
                for turn in range(_REPEATS):
                    time.sleep(rng.choice(_PAUSES_S))
                    times[CACHED][side].append(prompt.then(f"question {turn}").ask(server).ttft_s)
    found = hits(pair.cornplug, "embedding") - before
    if found["service_computed"] != _ROUNDS:
        raise SystemExit(f"of {_ROUNDS} new images the service computed {dict(found)}: no fair measurement")
    report.facts["used by the engine that waits"] = str(idle)
    return times


def judge(report: Report, measured: Sequence[Mapping[str, Times]]) -> list[str]:
    """Fill `report` and return the bounds that are broken."""
    broken = []
    for name in (NEW, CACHED):
        stock, ours = ([s for times in measured for s in times[name][side]] for side in (STOCK, CORNPLUG))
        bound = RATIO + EXTRA_S / float(np.median(stock))
        row = Row(name=name, unit="s", stock=stock, cornplug=ours, target=round(bound, 3))
        report.rows.append(row)
        if row.ratio > bound:
            broken.append(f"{name}: {row.ratio:.2f} of stock's, the bound is {bound:.2f}")
        ratios = [np.median(times[name][CORNPLUG]) / np.median(times[name][STOCK]) for times in measured]
        report.facts[f"{name}, ratio of medians by pair of engines"] = ", ".join(f"{r:.2f}" for r in ratios)
        for share in (50, 95, 100):
            low, high = (1e3 * float(np.percentile(samples, share)) for samples in (stock, ours))
            report.facts[f"{name}, p{share}"] = f"stock {low:.0f} ms, cornplug {high:.0f} ms"
            if name == CACHED and share == 95 and high > RATIO * low + 1e3 * LATE_EXTRA_S:
                broken.append(f"{name}, p95: {high:.0f} ms, and stock takes {low:.0f} ms")
    return broken


if __name__ == "__main__":
    sys.exit(main())
