"""Python calls, kernel launches and copies of KV pages, counted without a GPU and compared with limits.

    python benchmarks/operation_counts.py

Counts are the same in every run. Prints each count beside its limit, and exits 1 if one exceeds it. It counts
SGLang's copies in either environment, calls of vLLM's scheduler (as `hot_path.py --counts`) and copies of
vLLM's worker in vLLM's environment, and calls of SGLang's reader and writer in SGLang's environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from operations import sglang_copies
from rich.console import Console
from rich.table import Table

from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies
from devkit.page_by_page import PageByPage

STEPS: Final = ((1, 1), (20, 1), (1, 20))
"""(pages of a request, requests) of a step."""
SGLANG_CALLS: Final = {("save", 64): 159, ("load", 64): 101, ("save", 16): 237, ("load", 16): 143}
"""(direction, SGLang's page size) -> limit of calls for a page of 64 tokens."""
SGLANG_COPY_CALLS: Final = {"save": 23, "load": 51}
"""Direction -> limit of calls that copy a page of an 8B model."""
CORE_CACHE_BYTES: Final = 1 << 20
"""Second-level cache of a server's core."""


class Count(NamedTuple):
    """One count and its limit; None if it is printed for comparison only."""

    what: str
    count: float
    limit: float | None


def scheduler() -> Iterator[Count]:
    """Python calls of vLLM's scheduler thread."""
    import hot_path

    for what, count in hot_path.counted().items():
        yield Count(what, count, hot_path.LIMITS[what])


def vllm_worker() -> Iterator[Count]:
    """Operations of the worker's copies: launches, copies and waits for each slab, not for each request."""
    from operations import vllm_copies

    page_bytes = vllm_copies.HEADS * vllm_copies.LAYERS * 2 * vllm_copies.PAGE * 128 * 2
    for pages, requests in STEPS:
        every, one = pages * requests, requests == 1
        found = vllm_copies.count(pages, requests)
        for name, slabs, mover, engine in (
            ("save", -(-every // 2), 105 if one else 125, 5 * requests + 40),
            ("load", requests * -(-pages // 2), 105 if one else 245, 32 * requests),
        ):
            counts, step = found[name], f"{name} of {pages} pages of {requests} requests"
            yield Count(f"{step}: launches", counts.launches, 2 * slabs)
            yield Count(f"{step}: copies between host and GPU", counts.crossings, 3 * slabs)
            yield Count(f"{step}: copies through pageable memory", counts.pageable, 0)
            yield Count(f"{step}: waits for the GPU", counts.waits, slabs)
            yield Count(f"{step}: bytes", counts.crossed_bytes, int(1.001 * every * page_bytes))
            yield Count(f"{step}: checksums", counts.hashes, vllm_copies.HEADS * every)
            yield Count(f"{step}: calls of the mover", counts.mover_calls, mover * every + 200)
            yield Count(f"{step}: calls of the engine", counts.engine_calls, engine)


def vllm_arena() -> Iterator[Count]:
    """Operations of a worker whose GPU copies to and from the store's memory by itself."""
    from operations import vllm_copies

    for pages, requests in STEPS:
        every, one = pages * requests, requests == 1
        found = vllm_copies.count_arena(pages, requests)
        for name, slabs, engine in (
            ("save", -(-every // 4), (36 if one else 75) * every + 200),
            ("load", requests * -(-pages // 4), (26 if one else 185) * every + 200),
        ):
            counts, step = found[name], f"GPU's own {name} of {pages} pages of {requests} requests"
            yield Count(f"{step}: launches", counts.launches, 5 * slabs)
            yield Count(f"{step}: copies between host and GPU", counts.crossings, every + 3 * slabs)
            yield Count(f"{step}: pageable copies, checksums, calls of the mover",
                        counts.pageable + counts.hashes + counts.mover_calls, 0)  # fmt: skip
            yield Count(f"{step}: calls of the engine", counts.engine_calls, engine)


def vllm_offloading() -> Iterator[Count]:
    """Operations of vLLM's own offloading worker, the alternative in `docs/decisions.md`."""
    from operations import vllm_copies

    for pages, tp in ((1, 1), (100, 1), (100, 2)):
        found = vllm_copies.count_offloading(pages, tp)
        step = f"vLLM's offloading worker, save of {pages} pages, one of {tp} ranks"
        yield Count(f"{step}: copies", found.crossings, None)
        yield Count(f"{step}: calls of the engine", found.engine_calls, None)


def sglang_page_copies() -> Iterator[Count]:
    """Operations of copies between SGLang's host pool and the store, for a page of an 8B model."""
    for layout in sglang_copies.LAYOUTS:
        before = sglang_copies.count(PageByPage, layout)
        for direction, found in sglang_copies.count(PageCopies, layout).items():
            page = f"SGLang, {direction} of a page, {layout}"
            yield Count(f"{page}: calls", found.calls, SGLANG_COPY_CALLS[direction])
            yield Count(f"{page}: calls, one page at a time", before[direction].calls, None)
            yield Count(f"{page}: checksums", found.sums, sglang_copies.PAGE.segments)
            yield Count(f"{page}: bytes in between", found.staged_bytes, CORE_CACHE_BYTES)


def sglang_storage() -> Iterator[Count]:
    """Calls of SGLang's storage threads for a page of a small model; its checksums are not counted."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.append(str(Path(__file__).parents[1]))
    for (direction, page_size), limit in SGLANG_CALLS.items():
        few, many = (sglang_copies.moved(direction, page_size, pages) for pages in (4, 12))
        a_page = {name: (count - few[name]) / 8 for name, count in many.items()}
        del a_page["xxh3_64_intdigest"]
        what = f"SGLang's storage, {direction} of a page, pages of {page_size} tokens: calls"
        yield Count(what, sum(a_page.values()), limit)


def main() -> int:
    """Count, print, and return 1 if a count exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="ignored: counts are not kept")
    parser.parse_args()
    groups = [sglang_page_copies]
    if importlib.util.find_spec("vllm") is not None:
        from operations import vllm_copies

        vllm_copies.small_slabs()
        groups += [scheduler, vllm_worker, vllm_offloading]
        if importlib.util.find_spec("triton") is not None:
            groups.append(vllm_arena)
    if importlib.util.find_spec("sglang") is not None:
        groups.append(sglang_storage)
    counts = [count for group in groups for count in group()]
    table = Table("operations", "count", "limit")
    for what, count, limit in counts:
        table.add_row(what, f"{count:g}", "" if limit is None else f"{limit:g}")
    Console(width=120).print(table)
    exceeded = [c for c in counts if c.limit is not None and c.count > c.limit]
    for what, count, limit in exceeded:
        print(f"{what}: {count:g}, limit {limit:g}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
