"""How many calls a page costs in SGLang's storage threads: they share the interpreter with its scheduler."""

from __future__ import annotations

from collections import Counter

import pytest

from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies
from cornplug.store.memory import MemoryStore
from devkit.page_by_page import PageByPage

from ..copy_operations import LAYOUTS, PAGE, calls, count
from ..kv_rig import HEADS, Engine, sequence

# Those of one checksum a segment, which the page's format asks for, are counted by themselves.
MOST_CALLS = {("save", 64): 159, ("load", 64): 101, ("save", 16): 237, ("load", 16): 143}
"""(direction, SGLang's page size) -> Python and C calls a page of 64 tokens; measured, and a tenth more."""
MOST_COPY_CALLS = {"save": 23, "load": 51}
"""Direction -> calls that copy a page of an 8B model, in any layout; measured, and a tenth more."""
CORE_CACHE_BYTES = 1 << 20
"""Of the second level, of cores of servers."""


def moved(direction: str, page_size: int, pages: int) -> Counter[str]:
    """Calls of a batch of so many store pages."""
    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect(), page_size=page_size, layout="page_first")
    tokens = [(7 * i) % 991 for i in range(pages * 64)]
    hashes = engine.knows(tokens)
    slots = engine.put(sequence(engine.geometry, len(tokens)), 0, len(hashes))
    if direction == "save":
        found = calls(lambda: engine.writer.save(hashes, slots))
        assert engine.counts()["cornplug_saves_total", "stored"] == pages
        return found
    engine.writer.save(hashes, slots)
    done: list[int] = []
    found = calls(lambda: done.append(engine.reader.load(hashes, slots)))
    assert done == [len(hashes)]
    return found


@pytest.mark.parametrize(("direction", "page_size"), MOST_CALLS)
def test_kv_page_moved_costs_few_calls(direction: str, page_size: int) -> None:
    few, many = moved(direction, page_size, 4), moved(direction, page_size, 12)
    a_page = {name: (count - few[name]) / 8 for name, count in many.items()}
    # One more: of the page's header.
    assert a_page.pop("xxh3_64_intdigest") == HEADS + 1
    assert sum(a_page.values()) <= MOST_CALLS[direction, page_size]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_page_of_8b_model_passes_core_cache_in_few_calls(layout: str) -> None:
    """A page at a time would write and read 8 MiB of memory between host pool and store."""
    before, now = count(PageByPage, layout), count(PageCopies, layout)
    for direction, most in MOST_COPY_CALLS.items():
        assert now[direction].calls <= most
        assert now[direction].sums == PAGE.segments
        assert now[direction].staged_bytes <= CORE_CACHE_BYTES < before[direction].staged_bytes
