"""Cost of each policy of saving (`engine.save`) where nothing is shared, over several instances a side.

    python benchmarks/miss_path_policies.py [--quick] [--sglang] [--out DIR]

Instances of one engine differ by 10 to 20 % on a small machine, so each side has several, which run one after
the other in a random order, each a fresh process. Every instance answers new prompts, of equal lengths:
first as many at a time as it takes, then as they come (Poisson) at 0.8 of a stock instance's rate.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from driver.open_load import Arrival, Took, arrivals, body, letters
from driver.open_load import run as run_open
from driver.requests import Request, run
from driver.stage import VLLM, Stage, options, stage
from driver.table import Report, Row
from miss_path import model

from devkit.engines import EngineServer, StoreProcess
from devkit.processes import cpu_s

THROUGHPUT, TTFT, TPOT, CPU = 0.99, 1.02, 1.02, 1.01
SIDES: Final = ("stock", "always", "second")
_LOAD = 0.8
_ANSWER_TOKENS = 16
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")
_SGLANG_FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8")
_CONCURRENCY = 12  # for 8 seats

Figures = dict[str, float]


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__, engines=True)
    engine = chosen.engine
    instances, size = (1, 12) if chosen.quick else (5, 40)
    report = Report(
        name="miss_path_policies" + ("" if engine == VLLM else f"_{engine.lower()}"),
        title="Nothing shared: what each policy of saving costs",
        engine=engine,
        quick=chosen.quick,
        set_up=[
            "LLM of 8 layers of 768, float32, random weights; prompts of 200 to 600 tokens, 16 answered.",
            f"{instances} fresh instances of each side, one after the other in a random order; prompts are "
            "new to each, their lengths are the same.",
            f"Saturated: {_CONCURRENCY} at a time for 8 seats. Open: Poisson arrivals at {_LOAD} of the rate "
            "of a stock instance that is measured first.",
            "CPU counts the engine's processes and the store, over both loads.",
        ],
    )
    found: dict[str, list[Figures]] = defaultdict(list)
    order = [side for side in SIDES for _ in range(instances)]
    random.Random(0).shuffle(order)
    with stage(flags=_FLAGS, kv_gib=1, sglang_flags=_SGLANG_FLAGS) as here, here.store("2GiB") as store:
        checkpoint = model(engine)
        with here.stock(checkpoint, engine) as server:
            rate = _LOAD * _saturated(server, 0, size)["requests/s"]
        for number, side in enumerate(order, 1):
            with _start(here, checkpoint, engine, side) as server:
                found[side].append(_measured(server, store, number, size, rate))
                found[side][-1]["pages"] = _saved(server) if side != "stock" else 0.0
    for side in SIDES[1:]:
        report.rows += _rows(side, found["stock"], found[side])
        report.facts[f"pages saved by {side}"] = sum(int(each["pages"]) for each in found[side])
    report.facts["arrivals"] = f"{rate:.2f} requests/s"
    report.facts["order"] = ", ".join(order)
    # "second" copies pages that no second request had, too, while vLLM is idle.
    if not report.facts["pages saved by always"] > report.facts["pages saved by second"]:
        raise SystemExit(f"not the miss path: {report.facts}")
    report.show()
    report.write(chosen.out)
    return 0


def _start(here: Stage, checkpoint: Path, engine: str, side: str) -> EngineServer:
    if side == "stock":
        return here.stock(checkpoint, engine)
    return here.cornplug(checkpoint, side, engine, "--cornplug-save", side)


def _prompts(instance: int, part: int, size: int) -> Iterator[str]:
    """Texts that no other instance has, of the lengths that every instance has."""
    lengths = random.Random(part).choices(range(200, 600), k=size)
    for i, tokens in enumerate(lengths):
        yield letters(tokens, (instance * 10 + part) * 100_000 + i)


def _saturated(server: EngineServer, instance: int, size: int) -> Figures:
    run(server, [Request(text, (), 4) for text in _prompts(instance, 0, 8)], _CONCURRENCY)  # warm-up
    load = run(
        server, [Request(text, (), _ANSWER_TOKENS) for text in _prompts(instance, 1, size)], _CONCURRENCY
    )
    return {"requests/s": load.requests_per_s, "tokens/s": load.tokens_per_s}


def _measured(server: EngineServer, store: StoreProcess, instance: int, size: int, rate: float) -> Figures:
    used = -cpu_s(server) - cpu_s(store)
    found = _saturated(server, instance, size)
    sent = [
        Arrival(float(at_s), "text", server.url, body(text, _ANSWER_TOKENS))
        for at_s, text in zip(arrivals(rate, size, 0), _prompts(instance, 2, size), strict=True)
    ]
    took = run_open(sent)
    used += cpu_s(server) + cpu_s(store)
    tokens = sum(len(text) + _ANSWER_TOKENS for part in (1, 2) for text in _prompts(instance, part, size))
    if any(math.isnan(each.e2e_s) for each in took):
        raise SystemExit("a request failed")
    return found | _times(took) | {"CPU": 1e3 * used / tokens}


def _times(took: list[Took]) -> Figures:
    ttft = np.array([each.ttft_s for each in took])
    tpot = np.array([(each.e2e_s - each.ttft_s) / (_ANSWER_TOKENS - 1) for each in took])
    return {
        "TTFT p50": float(np.quantile(ttft, 0.5)),
        "TTFT p95": float(np.quantile(ttft, 0.95)),
        "TPOT": float(tpot.mean()),
    }


def _saved(server: EngineServer) -> float:
    # A step's counters come out with the next one.
    for _ in range(2):
        server.chat("so", max_tokens=2)
    return server.metric("cornplug_saves_total", what="kv_page", outcome="stored")


def _rows(side: str, stock: list[Figures], ours: list[Figures]) -> list[Row]:
    def row(figure: str, name: str, unit: str, target: float, *, higher: bool = False) -> Row:
        return Row(
            name=f"{side}: {name}", unit=unit, stock=[each[figure] for each in stock],
            cornplug=[each[figure] for each in ours], target=target, better="higher" if higher else "lower",
        )  # fmt: skip

    return [
        row("requests/s", "saturated", "requests/s", THROUGHPUT, higher=True),
        row("tokens/s", "saturated", "tokens/s", THROUGHPUT, higher=True),
        row("TTFT p50", "open, TTFT p50", "s", TTFT),
        row("TTFT p95", "open, TTFT p95", "s", TTFT),
        row("TPOT", "open, time per output token", "s", TPOT),
        row("CPU", "CPU of engine and store", "ms/token", CPU),
    ]


if __name__ == "__main__":
    sys.exit(main())
