"""Cost of each policy of saving (`engine.save`) where nothing is shared, by the engine's own client.

    python benchmarks/miss_path_policies.py [--quick] [--sglang] [--default] [--out DIR]

Each round starts a fresh engine of every side and gives each, in a random order, prompts that nobody else
has: first as many at a time as it takes, then as they come (Poisson) at 0.8 of a stock engine's rate. Rounds
make several instances a side, for those of one engine differ by 10 to 20 % on a small machine; the sides of
a round are measured within minutes, so that the machine's own changes meet all of them. With `--default`
only stock and the default policy are compared, in more rounds. `vllm bench serve` and
`sglang.bench_serving` send the requests and measure; SGLang's needs script/site bench once.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
from driver.bench_serving import Served, serve
from driver.open_load import letters
from driver.stage import SGLANG, VLLM, Stage, options, stage
from driver.table import Report, Row
from miss_path import model

from devkit.engines import EngineServer, StoreProcess
from devkit.processes import cpu_s

THROUGHPUT, TTFT, TPOT, CPU = 0.99, 1.02, 1.02, 1.01
SIDES: Final = ("stock", "never", "second", "always")
DEFAULT: Final = ("stock", "second")
_LOAD: Final = 0.8
_ANSWER_TOKENS: Final = 16
_FLAGS: Final = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")
_SGLANG_FLAGS: Final = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8")
_CONCURRENCY: Final = 12  # for 8 seats
_CLIENT: Final = {VLLM: "vllm bench serve", SGLANG: "sglang.bench_serving"}
_IDLE_S: Final = 3.0
"""In which an engine ends what it does after the last request; its CPU time counts."""

Figures = dict[str, float]


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__, engines=True, default=True)
    engine = chosen.engine
    sides = DEFAULT if chosen.default else SIDES
    rounds, size = (1, 12) if chosen.quick else (10 if chosen.default else 5, 48)
    report = Report(
        name="_".join(
            ("miss_path_policies", *["default"] * chosen.default, *[engine.lower()] * (engine != VLLM))
        ),
        title="Nothing shared: what each policy of saving costs",
        engine=engine,
        quick=chosen.quick,
        set_up=[
            "LLM of 8 layers of 768, float32, random weights; prompts of 200 to 600 tokens, "
            f"{_ANSWER_TOKENS} answered; the client is `{_CLIENT[engine]}`.",
            f"{rounds} rounds, each with a fresh engine of every side, loaded one after the other in "
            "random order; prompts are new to each engine, their lengths are the same.",
            f"Saturated: {_CONCURRENCY} at a time for 8 seats. Open: Poisson arrivals at {_LOAD} of the rate "
            f"of a stock engine that is measured first. {size} requests each.",
            "CPU counts the engine's processes and the store, over both loads and what the engine does after "
            "them.",
        ],
    )
    if not chosen.default:
        report.set_up.append(
            "`never` copies nothing: what it costs is the rest of cornplug, and the spread of instances."
        )
    found: dict[str, list[Figures]] = defaultdict(list)
    with stage(flags=_FLAGS, kv_gib=1, sglang_flags=_SGLANG_FLAGS) as here, here.store("2GiB") as store:
        load = _Load(here, store, model(engine), engine, size)
        with here.stock(load.checkpoint, engine) as server:
            load.warm_up(server, 0)
            rate = _LOAD * load.saturated(server, 0).requests_per_s
        for number in range(1, rounds + 1):
            order = random.Random(number).sample(sides, len(sides))
            with ExitStack() as running:
                servers = {side: running.enter_context(load.start(side)) for side in order}
                for place, side in enumerate(order):
                    load.warm_up(servers[side], len(sides) * number + place)
                for place, side in enumerate(order):
                    found[side].append(load.measured(servers[side], len(sides) * number + place, rate))
                    found[side][-1]["pages"] = _saved(servers[side]) if side != "stock" else 0.0
    for side in sides[1:]:
        report.rows += _rows(side, found["stock"], found[side])
        report.facts[f"pages saved by {side}"] = sum(int(each["pages"]) for each in found[side])
    report.facts["arrivals"] = f"{rate:.2f} requests/s"
    # "second" copies pages that no second request had, too, while an engine is idle.
    if (
        not chosen.default
        and not report.facts["pages saved by always"] > report.facts["pages saved by second"]
    ):
        raise SystemExit(f"not the miss path: {report.facts}")
    report.show()
    report.write(chosen.out)
    return 0


class _Load:
    """What every engine gets; `instance` numbers engines, and no two get one prompt."""

    def __init__(self, here: Stage, store: StoreProcess, checkpoint: Path, engine: str, size: int) -> None:
        self.checkpoint = checkpoint
        self._here, self._store, self._engine, self._size = here, store, engine, size

    def start(self, side: str) -> EngineServer:
        if side == "stock":
            return self._here.stock(self.checkpoint, self._engine)
        return self._here.cornplug(self.checkpoint, side, self._engine, "--cornplug-save", side)

    def warm_up(self, server: EngineServer, instance: int) -> None:
        self._serve(server, instance, 0, 12, concurrency=_CONCURRENCY)

    def saturated(self, server: EngineServer, instance: int) -> Served:
        return self._serve(server, instance, 1, self._size, concurrency=_CONCURRENCY)

    def measured(self, server: EngineServer, instance: int, rate: float) -> Figures:
        used = -cpu_s(server) - cpu_s(self._store)
        full = self.saturated(server, instance)
        opened = self._serve(server, instance, 2, self._size, rate=rate)
        time.sleep(_IDLE_S)
        used += cpu_s(server) + cpu_s(self._store)
        tokens = sum(
            len(text) + _ANSWER_TOKENS for part in (1, 2) for text in _prompts(instance, part, self._size)
        )
        return {
            "requests/s": full.requests_per_s,
            "tokens/s": full.tokens_per_s,
            "TTFT p50": float(np.quantile(opened.ttft_s, 0.5)),
            "TTFT p95": float(np.quantile(opened.ttft_s, 0.95)),
            "TPOT": opened.tpot_s,
            "CPU": 1e3 * used / tokens,
        }

    def _serve(
        self, server: EngineServer, instance: int, part: int, size: int,
        *, rate: float = float("inf"), concurrency: int | None = None,
    ) -> Served:  # fmt: skip
        return serve(
            server, self._engine, self.checkpoint, self._here.folder, list(_prompts(instance, part, size)),
            _ANSWER_TOKENS, rate=rate, concurrency=concurrency,
        )  # fmt: skip


def _prompts(instance: int, part: int, size: int) -> Iterator[str]:
    """Texts that no other instance has, of the lengths that every instance has."""
    lengths = random.Random(part).choices(range(200, 600), k=size)
    for i, tokens in enumerate(lengths):
        yield letters(tokens, (instance * 10 + part) * 100_000 + i)


def _saved(server: EngineServer) -> float:
    # A step's counters come out with the next one.
    for _ in range(2):
        server.chat("so", max_tokens=2)
    return server.metric("cornplug_saves_total", kind="kv_page", outcome="stored")


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
