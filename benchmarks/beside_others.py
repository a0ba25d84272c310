"""Time to first token of a fresh engine beside stock, LMCache's server and vLLM's native KV offloading.

    python benchmarks/beside_others.py [--quick] [--out DIR]

An engine of each kind answers prompts of about 1,500 and 8,000 tokens and is stopped. Then four fresh engines
(stock, cornplug, LMCache MP, native offloading) get the same prefixes with a new last question, in turns.
The same pair of engines then serves two clients' patterns: `vllm bench serve` with its data set
prefix_repetition, and conversations of several rounds whose next round goes to the other engine.
LMCache needs script/site lmcache once; without it its column is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from driver import models
from driver.bench_serving import vllm_bench_serve
from driver.lmcache import SITE, Lmcache
from driver.requests import Request, words
from driver.stage import Stage, hits, options, stage
from driver.table import Report, Row

from cornplug.processes import ManagedProcess
from devkit.engines import EngineServer, VllmServer
from devkit.processes import StoreProcess, memory_bytes

TARGET: Final = 0.10
STOCK, CORNPLUG, LMCACHE, NATIVE = "stock", "cornplug", "LMCache 0.5.6 MP", "native offloading"
_MODEL: Final = {"hidden_size": 1024, "heads": 16, "kv_heads": 8, "max_positions": 16384}
_FLAGS: Final = ("--dtype", "float32", "--max-model-len", "9216", "--max-num-seqs", "4", "--block-size", "32")
_LENGTHS: Final = {"1.5k tokens": 1500, "8k tokens": 8000}
_BED: Final = "v1-one"
"""The one with a CPU worker for native offloading; all sides are on it."""

Make = Callable[[str], VllmServer]


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers, count = (4, 1) if chosen.quick else (8, 3)
    report = Report(
        name="beside_others",
        title="Fresh engine beside other caches: time to first token",
        quick=chosen.quick,
        set_up=[
            f"Qwen2 of {layers} layers of 1024 (16 heads of 64, 8 KV heads), float32, random weights.",
            "Prefixes of about 1,500 and 8,000 tokens that another engine of the same kind has served and "
            "saved; it was stopped before the fresh engines started. Then a last question that is new.",
            "Four fresh engines with the same flags, warmed up with the same other prompts, asked in turns.",
            "All save every prompt at once: cornplug has `--cornplug-save always`.",
            "Native offloading keeps its pages in the engine's process: a fresh engine has none. vLLM has it "
            "for GPUs only; torch makes its copies here (dev/host-offloading-cpu).",
            f"A token's KV has {layers * 2 * 8 * 64 * 4 >> 10} KiB. Memory is the growth of an engine and "
            "of the server of its pages while they save the prompts, without a stock engine's growth.",
        ],
    )
    model = models.qwen2_text(layers=layers, **_MODEL)
    with (
        stage(flags=_FLAGS, kv_gib=2) as here,
        here.store("3GiB") as store,
        sides(here, model, store) as (made, page_servers),
    ):
        fresh(report, made, page_servers, count)
        repeated_prefixes(report, here, made, model, 4 if chosen.quick else 16)
        conversations(report, made, users=2 if chosen.quick else 4)
    report.show()
    report.write(chosen.out)
    return 0


@contextmanager
def sides(
    here: Stage, model: Path, store: StoreProcess
) -> Iterator[tuple[Mapping[str, Make], Mapping[str, ManagedProcess]]]:
    """Kind of engine -> a function that makes one, by the name of its log; and kind of engine -> the process
    that keeps its pages."""

    def stock(name: str, *more: str) -> VllmServer:
        return VllmServer(model, *_FLAGS, *more, bed=_BED, **here.options(name))

    def cornplug(name: str) -> VllmServer:
        # As LMCache and native offloading do: they save a prompt when it is there for the first time.
        flags = ("--cornplug-store", str(here.store_socket), "--cornplug-save", "always")
        return stock(name, "--kv-connector", "cornplug", *flags)

    made: dict[str, Make] = {
        STOCK: stock,
        CORNPLUG: cornplug,
        NATIVE: lambda name: stock(name, "--kv-offloading-size", "2"),
    }
    page_servers: dict[str, ManagedProcess] = {CORNPLUG: store}
    with ExitStack() as ends:
        if SITE.is_dir():
            page_servers[LMCACHE] = server = ends.enter_context(Lmcache(here.folder, 3))
            made[LMCACHE] = lambda name: server.vllm(model, *_FLAGS, bed=_BED, **here.options(name))
        yield made, page_servers


def fresh(
    report: Report, made: Mapping[str, Make], page_servers: Mapping[str, ManagedProcess], count: int
) -> None:
    """Add a row a prompt's length, and the memory that each kind of engine uses for what it saves."""
    asked = [
        (kind, Request(words(tokens, 100 * tokens + i)))
        for kind, tokens in _LENGTHS.items()
        for i in range(count)
    ]
    growth: dict[str, float] = {}
    for kind in made:
        with made[kind](f"{kind}-writes") as writer:
            Request(words(max(_LENGTHS.values()), 900)).ask(writer)  # the buffers of the longest prompt
            watched = [writer, *([page_servers[kind]] if kind in page_servers else [])]
            before_bytes = memory_bytes(*watched)
            served = [request.then("who is this").ask(writer) for _, request in asked]
            if kind == CORNPLUG:
                hits(writer, "kv_page")  # two more steps: saved pages are committed
            growth[kind] = memory_bytes(*watched) - before_bytes
        if kind != STOCK:
            used = (growth[kind] - growth[STOCK]) / sum(answer.prompt_tokens for answer in served)
            report.facts[f"memory, {kind}"] = f"{used / 2**10:.1f} KiB a stored token"
    ttft: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in made} for kind in _LENGTHS}
    equal = tokens = 0
    with ExitStack() as running:
        servers = {side: running.enter_context(make(f"{side}-fresh")) for side, make in made.items()}
        for server in servers.values():
            for i in range(2):
                Request(words(700, 900 + i)).ask(server)
        before = servers[CORNPLUG].metric("cornplug_saved_tokens_total")
        for i, (kind, request) in enumerate(asked):
            order = list(servers)[i % len(servers) :] + list(servers)[: i % len(servers)]
            answers = {side: request.then("what happens next").ask(servers[side]) for side in order}
            for side, answer in answers.items():
                ttft[kind][side].append(answer.ttft_s)
            equal += len({answer.token_ids for answer in answers.values()}) == 1
            tokens += answers[STOCK].prompt_tokens
        hits(servers[CORNPLUG], "kv_page")
        saved = servers[CORNPLUG].metric("cornplug_saved_tokens_total") - before
    if saved < 0.9 * tokens:
        raise SystemExit(f"{saved:.0f} of {tokens} prompt tokens came from the store: no fair measurement")
    for kind, of in ttft.items():
        report.rows.append(
            Row(name=f"TTFT, {kind}", unit="s", stock=of[STOCK], cornplug=of[CORNPLUG], target=TARGET)
        )
        against(report, f"TTFT, {kind}", of)
    report.facts["prompt tokens from the store"] = f"{saved:.0f} of {tokens}"
    report.facts["answers equal on all sides, token by token"] = f"{equal} of {len(asked)}"


def against(report: Report, what: str, of: Mapping[str, Sequence[float]]) -> None:
    """Add a fact for each of the other caches: its figure, and both ratios."""
    for side in of.keys() - {STOCK, CORNPLUG}:
        own, stock, ours = (np.asarray(of[name]) for name in (side, STOCK, CORNPLUG))
        report.facts[f"{what}, {side}"] = (
            f"{np.median(own):.3f} s, {np.median(own / stock):.3f} of stock; "
            f"cornplug {np.median(ours / own):.3f} of it"
        )


def repeated_prefixes(
    report: Report, here: Stage, made: Mapping[str, Make], model: Path, prompts: int
) -> None:
    """Add the row of `vllm bench serve`: a fresh engine gets what another engine of its kind has had."""
    ttft: dict[str, Sequence[float]] = {}
    for side, make in made.items():
        with make(f"{side}-bench-first") as first:
            _bench_serve(first, here.folder, model, prompts)
            if side == CORNPLUG:
                hits(first, "kv_page")
        with make(f"{side}-bench-fresh") as server:
            Request(words(700, 900)).ask(server)
            ttft[side] = _bench_serve(server, here.folder, model, prompts)
    what = "TTFT, vllm bench serve, prefix_repetition"
    report.rows.append(Row(name=what, unit="s", stock=ttft[STOCK], cornplug=ttft[CORNPLUG]))
    against(report, what, ttft)


def _bench_serve(server: EngineServer, folder: Path, model: Path, prompts: int) -> Sequence[float]:
    """Times to first token, in the order of the requests, which is the same for each server."""
    options = [
        "--dataset-name", "prefix_repetition", "--num-prompts", str(prompts),
        "--prefix-repetition-prefix-len", "1500", "--prefix-repetition-suffix-len", "64",
        "--prefix-repetition-num-prefixes", str(max(1, prompts // 4)), "--prefix-repetition-output-len", "8",
        "--max-concurrency", "1",
    ]  # fmt: skip
    return vllm_bench_serve(server, model, folder, options).ttft_s


def conversations(report: Report, made: Mapping[str, Make], users: int, rounds: int = 4) -> None:
    """Add the row of multi-round-qa's pattern: each round repeats the whole conversation, and goes to the
    other of two engines, as a router without affinity sends it."""
    ttft: dict[str, list[float]] = {}
    for side, make in made.items():
        with make(f"{side}-rounds-0") as even, make(f"{side}-rounds-1") as odd:
            for server in (even, odd):
                Request(words(700, 900)).ask(server)
            history = {user: words(1000, 5000 + user) for user in range(users)}
            times = ttft[side] = []
            for number in range(rounds):
                for user in history:
                    request = Request(
                        f"{history[user]} {words(100, 6000 + 10 * user + number)}", max_tokens=16
                    )
                    answer = request.ask((even, odd)[number % 2])
                    history[user] = f"{request.prompt} {answer.text}"
                    if number:
                        times.append(answer.ttft_s)
    what = "TTFT, multi-round-qa's pattern on two engines, later rounds"
    report.rows.append(Row(name=what, unit="s", stock=ttft[STOCK], cornplug=ttft[CORNPLUG]))
    against(report, what, ttft)


if __name__ == "__main__":
    sys.exit(main())
