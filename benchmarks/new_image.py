"""What cornplug costs requests that gain nothing: a new image, and a prompt in the engine's own cache.

    python benchmarks/new_image.py [--quick] [--out DIR]

A stock engine and an engine with cornplug, an encoder service and a store run side by side. In each
round both engines, in random order, are asked about an image that neither has seen, and then
get the same prompt with other questions after random pauses. The stock engine runs its own tower,
the other engine asks the service. Repeated prompts come from each engine's own prefix cache.
The exit status is 1 if a bound is broken.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
from driver import models
from driver.requests import Request, images, words
from driver.stage import Idle, Pair, Stage, hits, options, stage
from driver.table import Report, Row

from devkit.checkpoints import CLIP_L_336
from devkit.engines import EngineServer

RATIO, EXTRA_S = 1.10, 0.020
"""A request may take this multiple of the stock engine's time, plus this many seconds (median)."""
LATE_EXTRA_S = 0.050
"""The same for the 95th percentile of cached prompts, beside `RATIO`."""
_SMALL_CLIP = {**CLIP_L_336, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
               "num_attention_heads": 8}  # fmt: skip
_LLM = {"hidden_size": 384, "layers": 6, "heads": 6}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32")
_PREAMBLE_TOKENS = 300
_ROUNDS = 20
_REPEATS = 3
_PAUSES_S = (0.0, 0.03, 0.06, 0.1, 0.2)
"""Before a repeat. Idle saves begin 0.05 s after the last token: repeats come before, during and after."""
_QUIET_S = 1.1
"""Before a new image. vLLM's workers poll without a pause for a second after their last request."""
Times = dict[EngineServer, list[float]]
NEW, CACHED = "TTFT, new image", "TTFT, prompt in the engine's own cache"


def main() -> int:
    """Measure, print and write. Returns 1 if a bound is broken."""
    chosen = options(__doc__)
    report = Report(
        name="new_image",
        title="Nothing to gain: a new image, and a prompt in the engine's own cache",
        quick=chosen.quick,
        set_up=[
            f"Tower: CLIP {'of 12 layers of 512' if chosen.quick else '-L/336 (24 layers of 1024)'}, 577 "
            "positions; language model: 6 layers of 384; float32, random weights.",
            "Stock and cornplug answer one request at a time, in random order; the other engine idles. Same "
            "flags, and one compute thread in each engine and in the encoder service.",
            f"Each round has one new image, {_QUIET_S:g} s after the last request, and {_REPEATS} repeats of "
            f"its prompt with another question, each after a random pause of up to {max(_PAUSES_S):g} s.",
        ],
    )
    vision = _SMALL_CLIP if chosen.quick else dict(CLIP_L_336)
    model = models.llava(**_LLM, vision=vision)
    with stage(flags=_FLAGS, kv_gib=1) as here, here.store("1GiB"), here.encoder(model):
        broken = measure(report, here, model)
    report.show()
    report.write(chosen.out)
    for line in broken:
        print(f"BROKEN: {line}")
    return 1 if broken else 0


def measure(report: Report, here: Stage, model: Path) -> list[str]:
    """Fill `report` and return the bounds that are broken."""
    seen, rng = images(336), random.Random(1)
    with here.pair(model, "new") as pair:
        sides, idle = (pair.stock, pair.cornplug), Idle(pair)
        for i, image in enumerate(islice(seen, 2)):
            for server in sides:
                for question in ("warm up", "again"):
                    Request(words(_PREAMBLE_TOKENS, 900 + i), (image,)).then(question).ask(server)
        before = hits(pair.cornplug, "embedding")
        new: Times = {server: [] for server in sides}
        cached: Times = {server: [] for server in sides}
        for i, image in enumerate(islice(seen, _ROUNDS)):
            prompt = Request(words(_PREAMBLE_TOKENS, i), (image,))
            for server in rng.sample(sides, 2):
                time.sleep(_QUIET_S)
                (other,) = set(sides) - {server}
                with idle.watch(other):
                    new[server].append(prompt.then("what is new").ask(server).ttft_s)
                    for turn in range(_REPEATS):
                        time.sleep(rng.choice(_PAUSES_S))
                        cached[server].append(prompt.then(f"question {turn}").ask(server).ttft_s)
        found = hits(pair.cornplug, "embedding") - before
    if found["service_computed"] != _ROUNDS:
        raise SystemExit(f"of {_ROUNDS} new images the service computed {dict(found)}: no fair measurement")
    report.facts["used by the engine that waits"] = str(idle)
    return _judge(report, pair, new, cached)


def _judge(report: Report, pair: Pair, new: Times, cached: Times) -> list[str]:
    broken = []
    for name, times in ((NEW, new), (CACHED, cached)):
        stock, ours = times[pair.stock], times[pair.cornplug]
        bound = RATIO + EXTRA_S / float(np.median(stock))
        row = Row(name=name, unit="s", stock=stock, cornplug=ours, target=round(bound, 3))
        report.rows.append(row)
        if row.ratio > bound:
            broken.append(f"{name}: {row.ratio:.2f} of stock's, the bound is {bound:.2f}")
        for share in (50, 95, 100):
            low, high = (1e3 * float(np.percentile(samples, share)) for samples in (stock, ours))
            report.facts[f"{name}, p{share}"] = f"stock {low:.0f} ms, cornplug {high:.0f} ms"
    late, stocks_late = (float(np.percentile(cached[side], 95)) for side in (pair.cornplug, pair.stock))
    if late > RATIO * stocks_late + LATE_EXTRA_S:
        broken.append(f"{CACHED}, p95: {1e3 * late:.0f} ms, and stock takes {1e3 * stocks_late:.0f} ms")
    return broken


if __name__ == "__main__":
    sys.exit(main())
