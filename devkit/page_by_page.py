"""The copies between SGLang's host pool and the store as they were, to be counted and timed beside today's.

One page at a time is gathered into memory of its size, summed and copied from there, and the same way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CornplugError
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice
from cornplug.store.base import Lease, PayloadLocation


class PageByPage(PageCopies):
    """`PageCopies` on tensors: `at` returns (heads, layers, planes, tokens, dim)."""

    def __init__(self, mine: RankPages, host: HostPages) -> None:
        super().__init__(mine, host)
        self._memory = mine.allocate_shard()

    def host_page(self, slot: int) -> Any:
        return self._host.page(slot)

    def write(
        self, pages: Sequence[tuple[Sequence[PageSlice], PayloadLocation]], should_stop: Callable[[], bool]
    ) -> list[dict[int, int] | None]:
        found: list[dict[int, int] | None] = []
        for parts, location in pages:
            for inside, there in parts:
                self._memory[:, :, :, inside].copy_(there)
            found.append(self._rank_pages.write(self._memory, location))
        return found

    def read(
        self, pages: Sequence[tuple[Lease, Sequence[PageSlice]]], should_stop: Callable[[], bool]
    ) -> tuple[int, CornplugError | None]:
        for lease, parts in pages:
            self._rank_pages.read(lease, self._memory)
            for inside, tensor in parts:
                there: Any = tensor
                there.copy_(self._memory[:, :, :, inside])
        return len(pages), None
