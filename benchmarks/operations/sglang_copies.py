"""Operations of the copies between SGLang's host pool and the store, counted for pages of an 8B model.

Needs nothing of SGLang: the host pool is memory of its shapes. `moved` also counts lookups, reservations and
commits: it needs SGLang, and the rig of its tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, SimpleNamespace

import torch

from cornplug.engine_common.rank_pages import RankPages, page_headers
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.memory import MemoryStore
from devkit.page_by_page import PageByPage

PAGE = PageGeometry(page_tokens=64, heads=8, layers=32, dim=128, dtype="bfloat16")
"""Llama 3 8B's at TP 1: 8 MiB."""
LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head")


@dataclass(slots=True)
class PageOperations:
    """Operations a page."""

    calls: float
    """Python and C functions that were called, checksums among them."""
    copies: int
    """Copies of arrays, each one call of numpy or torch."""
    sums: int
    """Calls that checksum bytes."""
    staged_bytes: int
    """Memory between host pool and store that a page passes: what is beyond a core's cache is written and
    read once more."""


def calls(work: Callable[[], object]) -> Counter[str]:
    """Python and C functions that it calls, by their names."""
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


def host_memory(layout: str, pages: int) -> HostPages:
    """A host pool of so many pages, in SGLang's shape."""
    heads, layers, planes, tokens, dim = PAGE.shape
    shape = {
        "layer_first": (planes, layers, pages * tokens, heads, dim),
        "page_first": (planes, pages * tokens, layers, heads, dim),
        "page_first_direct": (planes, pages, layers, tokens, heads, dim),
        "page_head": (planes, pages, heads, tokens, layers, dim),
    }[layout]
    buffer = torch.zeros(shape, dtype=torch.bfloat16)
    pool = SimpleNamespace(page_size=tokens, size=pages * tokens, layout=layout, kv_buffer=buffer)
    return HostPages(pool, latent=False)


def count(kind: Callable[[RankPages, HostPages], PageCopies], layout: str) -> dict[str, PageOperations]:
    """Operations of "save" and "load", a page."""
    few, many = (_moved(kind, layout, pages) for pages in (1, 3))
    found = {}
    for direction, (counted, copies) in many.items():
        # What a call costs besides its pages falls away.
        a_page = {name: (n - few[direction][0][name]) / 2 for name, n in counted.items()}
        by_page = isinstance(copies, PageByPage)
        sums = a_page["xxh3_64_intdigest"] - (direction == "load")  # one is of the page's header
        found[direction] = PageOperations(
            calls=sum(a_page.values()),
            copies=1 + PAGE.segments if by_page else 2 * len(copies._blocks(copies._scratch[0], 1)),
            sums=int(sums),
            staged_bytes=PAGE.page_bytes if by_page else copies._scratch[0].memory.nbytes,
        )
    return found


def _moved(
    kind: Callable[[RankPages, HostPages], PageCopies], layout: str, pages: int
) -> dict[str, tuple[Counter[str], PageCopies]]:
    """Calls that save and load so many pages."""
    store = MemoryStore(capacity_bytes=64 << 20).connect()
    held = RankSlice(heads=range(PAGE.heads), layers=range(PAGE.layers), writes=True)
    host = host_memory(layout, pages)
    copies = kind(RankPages(PAGE, held, store), host)
    parts = [[PageSlice(slice(0, 64), copies.host_page(64 * i))] for i in range(pages)]
    entries = [(bytes([i]) * 32, PAGE.page_bytes) for i in range(pages)]
    replies = store.reserve(entries, ReserveTerms("test"), deadline_s=1)
    given = [reservation for reservation in replies if isinstance(reservation, Reservation)]
    places = [(some, reservation.location) for some, reservation in zip(parts, given, strict=True)]
    written: list[dict[int, int] | None] = []
    saved = calls(lambda: written.extend(copies.write(places, lambda: False)))
    headers = page_headers(
        [(reservation.key, sums or {}) for reservation, sums in zip(given, written, strict=True)], PAGE
    )
    assert all(store.commit(list(zip(given, headers, strict=True)), deadline_s=1))
    leases = [one for one in store.lease([key for key, _ in entries], ttl_s=60, deadline_s=1) if one]
    jobs = list(zip(leases, parts, strict=True))
    done: list[object] = []
    loaded = calls(lambda: done.append(copies.read(jobs, lambda: False)))
    assert done == [(pages, None)]
    return {"save": (saved, copies), "load": (loaded, copies)}


def moved(direction: str, page_size: int, pages: int) -> Counter[str]:
    """Calls that save or load `pages` pages of a small model, lookups and reservations included."""
    from tests.sglang_hooks.kv_rig import Engine, sequence  # needs SGLang

    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect(), page_size=page_size, layout="page_first")
    tokens = [(7 * i) % 991 for i in range(pages * 64)]
    hashes = engine.knows(tokens)
    slots = engine.put(sequence(engine.geometry, len(tokens)), 0, len(hashes))
    if direction == "save":
        return calls(lambda: engine.writer.save(hashes, slots))
    engine.writer.save(hashes, slots)
    return calls(lambda: engine.reader.load(hashes, slots))
