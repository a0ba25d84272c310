"""How many calls a page costs in SGLang's storage threads: they share the interpreter with its scheduler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from cornplug.store.memory import MemoryStore

from ..kv_rig import HEADS, Engine, sequence

# Those of one checksum a segment, which the page's format asks for, are counted by themselves.
MOST_CALLS = {("save", 64): 205, ("load", 64): 146, ("save", 16): 280, ("load", 16): 185}
"""(direction, SGLang's page size) -> Python and C calls a page of 64 tokens; measured, and a tenth more."""


def calls(work: Callable[[], object]) -> Counter[str]:
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1
        elif event == "c_call":
            found[getattr(function, "__name__", "")] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


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


@pytest.mark.parametrize("page_size", [64, 16])
def test_kv_page_saved_is_gathered_once_a_host_page(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One strided copy gathers all heads and layers of a host page."""
    copied: list[int] = []
    original = torch.Tensor.copy_

    def copy(this: torch.Tensor, source: torch.Tensor, *args: object) -> torch.Tensor:
        copied.append(source.numel())
        return original(this, source, *args)  # type: ignore[arg-type]

    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect(), page_size=page_size)
    tokens = [(7 * i) % 991 for i in range(256)]
    pages = engine.knows(tokens), engine.put(sequence(engine.geometry, 256), 0, 256 // page_size)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    engine.writer.save(*pages)
    assert len(copied) == 256 // page_size
    assert len(set(copied)) == 1
