"""Cost of KV sharing to vLLM's scheduler: time and Python calls of a step, of a lookup, of a page.

    python benchmarks/hot_path.py [--counts] [--out DIR]

The connector's scheduler half alone, with vLLM's `Request`s around it, as the engine's thread calls it. Pages
have the segments of Llama-3.1-8B's (8 heads x 32 layers, 64 tokens); only their bytes are fewer, which this
half never touches. Times are against a store in another process, one step every 10 ms. Python calls are
counted over a store in memory, without the store's own: they are the same in every run, and the benchmark
exits 1 when one exceeds its limit. `--counts` counts only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, TypeVar
from unittest import mock

import machine
import scheduler_sides
from rich.console import Console
from rich.table import Table
from stopwatch import STEP_S, Row, Stopwatch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from cornplug.config import Config, EngineConfig, StoreConfig
from cornplug.engine_common.rank_pages import page_header
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.store.base import Reservation, ReserveTerms, Store
from cornplug.store.client import PoolStore
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv import page_keys, page_saves, tracked_requests
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, CornplugKVWorkerMetadata
from cornplug.vllm_connector.kv.page_kinds import PageKind
from cornplug.vllm_connector.kv.scheduler import KVScheduler
from devkit.processes import StoreProcess

T = TypeVar("T")
PAGE: Final = PageGeometry(page_tokens=64, heads=8, layers=32, dim=1, dtype="bfloat16")
SECRET: Final = bytes(range(32))
RUNNING: Final = 256
STEPS: Final = 48
"""A multiple of 16, as one step in 16 is timed; below 64, so that a page completes at most once."""
PROMPT_TOKENS: Final = 128 << 10
PREFIX_TOKENS: Final = 6 << 10
_BLOCK_TOKENS: Final = 16
_BLOCKS: Final = 256
"""Of a request that decodes: 4,096 tokens."""
_DEADLINE_S: Final = 5.0
_STORE: Final = str(Path(sys.modules[MemoryStore.__module__].__file__ or "").parent)

LIMITS: Final = {
    "step of 256 requests, no page completes": 22.5,
    "page of a decoding request, saved": 29,
    "page of a prompt, saved": 12.5,
    "lookup of 128k tokens, first page absent": 108,
    "page of a 6k prefix, leased": 2.6,
}
"""Python calls. One that grows is a cost to every engine: raise a limit only with the times beside it."""


class Half:
    """The scheduler half over a store, and the engine's requests."""

    def __init__(self, store: Store) -> None:
        config = Config(
            store=StoreConfig(deadline_s=_DEADLINE_S, load_when="always"),
            engine=EngineConfig(app="bench", save="always", page_tokens=PAGE.page_tokens),
        )
        runtime: Any = SimpleNamespace(
            config=config, app="bench", secret=SECRET, store=store, deadline_s=_DEADLINE_S,
            background_timeout_s=_DEADLINE_S,
        )  # fmt: skip
        engine: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
        with (
            mock.patch.object(tracked_requests, "kv_identity", return_value=(b"lm" * 16, {"model": "8B"})),
            mock.patch.object(page_saves, "MAX_OPEN_SAVES_BYTES", 1 << 40),
        ):
            self.tally = Tally()
            self.scheduler = KVScheduler(engine, runtime, [PageKind(PAGE, _BLOCK_TOKENS, ())], self.tally)
        table = [SimpleNamespace(block_id=block, is_null=False) for block in range(_BLOCKS)]
        blocks = SimpleNamespace(blocks=(table,))
        pool = SimpleNamespace(
            enable_caching=False, touch=lambda blocks: None, unpin_blocks=lambda blocks, on_reuse: None
        )
        manager: Any = SimpleNamespace(block_pool=pool, get_blocks=lambda request_id: blocks)
        self.scheduler.bind(manager, [SimpleNamespace(block_size=_BLOCK_TOKENS)])  # type: ignore[list-item]
        self._names = itertools.count()

    def request(self, tokens: Sequence[int]) -> Request:
        return Request(f"request-{next(self._names)}", list(tokens), SamplingParams(max_tokens=1 << 20), None)

    def lookup(self, request: Request) -> int:
        """Tokens that the store offers; the offer is withdrawn when the request is over."""
        return self.scheduler.matched_tokens(request, 0)

    def take(self, request: Request, tokens: int) -> CornplugKVMetadata:
        """The metadata of the step that loads an offer."""
        self.scheduler.handle_allocation(request, [list(range(-(-tokens // _BLOCK_TOKENS)))], tokens)
        return self.scheduler.build_metadata(NO_REQUEST)

    def step(self, output: Any, acks: CornplugKVWorkerMetadata) -> CornplugKVMetadata:
        """The metadata of a step with this scheduler's output, and with the answers to an earlier step."""
        moves = self.scheduler.build_metadata(output)
        self.scheduler.handle_acks(acks)
        self.scheduler.record_step_end()
        return moves


def output_of(requests: Sequence[Request], tokens: int = 1) -> Any:
    """The fields of vLLM's SchedulerOutput that the connector reads."""
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: tokens for request in requests},
        total_num_scheduled_tokens=tokens * len(requests),
        preempted_req_ids=None,
        scheduled_encoder_inputs={},
    )


NO_REQUEST: Final = output_of([])
NO_ANSWER: Final = CornplugKVWorkerMetadata()


def written(moves: CornplugKVMetadata) -> CornplugKVWorkerMetadata:
    """The acknowledgements of a rank that wrote all pages of a step."""
    sums = {segment: (1 << 63) + segment for segment in range(PAGE.segments)}
    tokens = [page.token for save in moves.saves for page in save.pages]
    return CornplugKVWorkerMetadata(
        written={token: dict(sums) for token in tokens},
        timed_steps=[moves.timed_step] if moves.timed_step else [],
    )


def prompt(tokens: int, seed: int) -> list[int]:
    return [(31 * i + 7919 * seed + 3) % 128_000 for i in range(tokens)]


def fill(store: Store, half: Half, tokens: Sequence[int]) -> None:
    """Put all whole pages of a prompt into the store, without their bytes."""
    request = half.request(tokens)
    half.lookup(request)
    keys = half.scheduler._requests.get(request.request_id).keys.keys_until(tokens, len(tokens))  # type: ignore[union-attr]
    sums = {segment: (1 << 63) + segment for segment in range(PAGE.segments)}
    for start in range(0, len(keys), 64):
        entries = [(key, PAGE.page_bytes) for key in keys[start : start + 64]]
        answers = store.reserve(entries, ReserveTerms("bench"), deadline_s=_DEADLINE_S)
        while not all(isinstance(answer, Reservation) for answer in answers):
            time.sleep(0.01)  # It grows.
            store.release([a.token for a in answers if isinstance(a, Reservation)], deadline_s=_DEADLINE_S)
            answers = store.reserve(entries, ReserveTerms("bench"), deadline_s=_DEADLINE_S)
        pages = [(a, page_header(a.key, PAGE, sums)) for a in answers if isinstance(a, Reservation)]
        assert all(store.commit(pages, deadline_s=_DEADLINE_S))
    over(half, request)


def over(half: Half, request: Request) -> None:
    """The request ends before it ran."""
    request.status = type(request.status).FINISHED_ABORTED
    half.scheduler.finish_request(request, [()])


class Decoding:
    """256 running requests; of each 64 steps a request completes a page in one."""

    def __init__(self, half: Half, first_tokens: Callable[[int], int]) -> None:
        self.half, self.acks = half, NO_ANSWER
        self.requests = [half.request(prompt(first_tokens(i), 1000 + i)) for i in range(RUNNING)]
        for request in self.requests:
            half.lookup(request)
            request.num_computed_tokens = request.num_tokens - 1
        self.output = output_of(self.requests)
        self.pages = 0
        # The first step looks at every request.
        self.computed(self.step())

    def step(self) -> CornplugKVMetadata:
        """The part that is measured."""
        return self.half.step(self.output, self.acks)

    def computed(self, moves: CornplugKVMetadata) -> None:
        """The engine has computed a token of each request, and written its pages."""
        self.acks = written(moves)
        self.pages += len(self.acks.written)
        for request in self.requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(5)

    def rest(self) -> CornplugKVMetadata:
        """As `step`, of an engine that has nothing to compute: the last pages are asked for and committed."""
        return self.half.step(NO_REQUEST, self.acks)

    def rested(self, moves: CornplugKVMetadata) -> None:
        """The engine has written the pages of such a step."""
        self.acks = written(moves)
        self.pages += len(self.acks.written)

    def end(self) -> None:
        """All requests are over."""
        while self.half.scheduler.has_open_saves():
            self.rested(self.rest())
        for request in self.requests:
            over(self.half, request)


def calls(run: Callable[[], T]) -> tuple[int, T]:
    """(Python calls of `run` without those of the store and of this file, its result)"""
    count = 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and name != __file__ and not name.startswith(_STORE)

    gc.disable()
    sys.setprofile(seen)
    try:
        result = run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, result


def counted() -> dict[str, float]:
    """Python calls of each line of `LIMITS`."""
    store = MemoryStore(capacity_bytes=1 << 30).connect()
    half = Half(store)
    found: dict[str, float] = {}

    def decode(first_tokens: Callable[[int], int]) -> tuple[int, int]:
        decoding, total = Decoding(half, first_tokens), 0
        decoding.pages = 0
        for _ in range(STEPS):
            count, moves = calls(decoding.step)
            total += count
            decoding.computed(moves)
        while half.scheduler.has_open_saves():
            count, moves = calls(decoding.rest)
            total += count
            decoding.rested(moves)
        decoding.end()
        return total, decoding.pages

    idle, pages = decode(lambda i: 1)
    assert not pages
    busy, pages = decode(lambda i: 1 + i % 64)
    assert pages == STEPS * RUNNING // 64
    found["step of 256 requests, no page completes"] = idle / STEPS
    found["page of a decoding request, saved"] = (busy - idle) / pages
    request = half.request(prompt(PREFIX_TOKENS, 1))
    half.lookup(request)
    reserving, moves = calls(lambda: half.step(output_of([request], PREFIX_TOKENS), NO_ANSWER))
    acks = written(moves)
    assert len(acks.written) == PREFIX_TOKENS // PAGE.page_tokens
    committing, _ = calls(lambda: (half.step(NO_REQUEST, acks), half.step(NO_REQUEST, NO_ANSWER)))
    found["page of a prompt, saved"] = (reserving + committing) / len(acks.written)
    missing = half.request(prompt(PROMPT_TOKENS, 2))
    found["lookup of 128k tokens, first page absent"] = calls(lambda: half.lookup(missing))[0]
    again = half.request([*prompt(PREFIX_TOKENS, 1), 1])
    leasing, offered = calls(lambda: half.lookup(again))
    assert offered == PREFIX_TOKENS
    taking, _ = calls(lambda: half.take(again, offered))
    found["page of a 6k prefix, leased"] = (leasing + taking) / len(acks.written)
    return found


def timed() -> list[Row]:
    """Times of the engine's thread, against a store in another process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-")))
        config = StoreConfig(
            socket=folder / "s.sock", size_bytes=1 << 30, secret_file=folder / "secret", autostart=False
        )
        secret = {"CORNPLUG_STORE_SECRET_FILE": str(config.secret_file)}
        stack.enter_context(StoreProcess(config.socket, size="1GiB", env=secret))
        store = PoolStore(config, connect_timeout_s=10)
        stack.callback(store.close)
        sides = side_rows(Half(store))
        half = Half(store)
        return [*sides, *decoding_rows(half), *prompt_rows(half), *lookup_rows(store, half)]


def side_rows(half: Half) -> list[Row]:
    """vLLM's own scheduler, with `half` and without it; 4 pages complete in a step, on average."""
    found = scheduler_sides.sides(RUNNING, 2 * STEPS, STEP_S, half.scheduler, written)
    rows = {}
    for name, took in found.items():
        watch = Stopwatch()
        watch.took = [(clock, cpu) for cpu, clock in took]
        rows[name] = watch.mean_row(f"vLLM's scheduler, step of {RUNNING} requests: {name}")
    more = rows["cornplug"].cpu_ms - rows["stock"].cpu_ms
    ratio = rows["cornplug"].cpu_ms / rows["stock"].cpu_ms
    note = f"{ratio:.2f} of stock; {more / STEP_S / 10:.1f} % of 10 ms more"
    return [rows["stock"], rows["cornplug"]._replace(note=note)]


def decoding_rows(half: Half) -> list[Row]:
    rows = []
    for what, first_tokens in (
        ("no page completes", lambda i: 1),
        ("4 pages complete", lambda i: 1 + i % 64),
    ):
        decoding, watch = Decoding(half, first_tokens), Stopwatch()
        for _ in range(STEPS):
            began = time.perf_counter()
            decoding.computed(watch(decoding.step))
            time.sleep(max(0.0, began + STEP_S - time.perf_counter()))
        decoding.end()
        # Several steps' pages are asked for in one of them.
        rows.append(watch.mean_row(f"step of {RUNNING} requests, {what}", "{step} % of 10 ms, mean"))
    return rows


def prompt_rows(half: Half) -> list[Row]:
    offer, commit = Stopwatch(), Stopwatch()
    for seed in range(7):
        request = half.request(prompt(PREFIX_TOKENS, 100 + seed))
        half.lookup(request)
        time.sleep(0.1)
        output = output_of([request], PREFIX_TOKENS)
        acks = written(offer(lambda output=output: half.step(output, NO_ANSWER)))
        commit(lambda acks=acks: (half.step(NO_REQUEST, acks), half.step(NO_REQUEST, NO_ANSWER)))
    return [
        offer.row("6k tokens of a prompt computed: keys, reserve"),
        commit.row("the same: acknowledged, committed"),
    ]


def lookup_rows(store: Store, half: Half) -> list[Row]:
    fill(store, half, prompt(PREFIX_TOKENS, 1))
    fill(store, half, prompt(PROMPT_TOKENS, 2))
    absent = iter(range(10_000, 20_000))
    cases: dict[str, Callable[[], list[int]]] = {
        "lookup of 8k tokens, first page absent": lambda: prompt(8 << 10, next(absent)),
        "lookup of 128k tokens, first page absent": lambda: prompt(PROMPT_TOKENS, next(absent)),
        "lookup of 128k tokens, first 6k present": lambda: [
            *prompt(PREFIX_TOKENS, 1), *prompt(PROMPT_TOKENS - PREFIX_TOKENS, next(absent)),
        ],
        "lookup of 6k tokens, all present": lambda: [*prompt(PREFIX_TOKENS, 1), 1],
        "lookup of 128k tokens, all present": lambda: [*prompt(PROMPT_TOKENS, 2), 1],
    }  # fmt: skip
    rows = []
    for what, tokens in cases.items():
        receive, lookup, dump, load = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
        size_bytes = 0
        for _ in range(7):
            request = half.request(tokens())
            receive(lambda request=request: page_keys.compute_early_keys(request))
            time.sleep(0.05)
            offered = lookup(lambda request=request: half.lookup(request))
            if offered:
                moves = half.take(request, offered)
                data = dump(lambda moves=moves: pickle.dumps(moves, protocol=pickle.HIGHEST_PROTOCOL))
                load(lambda data=data: pickle.loads(data))
                half.scheduler.end_load(request.request_id)
                size_bytes = len(data)
            over(half, request)
        rows.append(lookup.row(what))
        rows.append(receive.row("its keys", "thread that receives requests"))
        if size_bytes:
            rows.append(dump.row("its metadata: pickle", f"{size_bytes / 1e6:.2f} MB"))
            rows.append(load.row("its metadata: unpickle", "each rank"))
    return rows


def grown(found: dict[str, float]) -> list[str]:
    """The lines of `LIMITS` that are exceeded."""
    return [what for what, limit in LIMITS.items() if found[what] > limit]


def main() -> int:
    """Count, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", action="store_true", help="count Python calls only, write nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    described = machine.describe()
    found = counted()
    show(found, [] if args.counts else timed(), described, None if args.counts else args.out)
    for what in grown(found):
        print(f"{what}: {found[what]:g} Python calls, limit {LIMITS[what]:g}", file=sys.stderr)
    return 1 if grown(found) else 0


def show(found: dict[str, float], rows: list[Row], described: dict[str, Any], out: Path | None) -> None:
    table = Table("engine's thread", "ms", "CPU ms", "", title="KV sharing in vLLM's scheduler")
    lines = ["| engine's thread | ms | CPU ms | |", "|---|--:|--:|---|"]
    for row in rows:
        cells = [row.what, f"{row.ms:.2f}", f"{row.cpu_ms:.2f}", row.note]
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    counts = Table("Python calls", "count", "limit")
    lines += ["", "| Python calls | count | limit |", "|---|--:|--:|"]
    for what, limit in LIMITS.items():
        counts.add_row(what, f"{found[what]:.1f}", f"{limit:g}")
        lines.append(f"| {what} | {found[what]:.1f} | {limit:g} |")
    console = Console(width=110)
    if rows:
        console.print(table)
    console.print(counts)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    text = f"# KV sharing in vLLM's scheduler\n\n{__doc__.partition(chr(10))[0]}\n\n" + "\n".join(lines)
    (out / "hot_path.md").write_text(f"{text}\n\n```\n{json.dumps(described, indent=1)}\n```\n")
    figures = {"machine": described, "rows": [row._asdict() for row in rows], "calls": found}
    (out / "hot_path.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
