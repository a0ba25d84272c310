"""Pages from the store into SGLang's host pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CodecError, CornplugError, StoreUnavailable
from cornplug.identity import page_key
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots, RootsOfCall
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PagePart
from cornplug.sglang_hooks.kv_pages.page_hash_index import (
    CacheNamespace,
    HashedPage,
    PageHashIndex,
    PageOverlap,
)
from cornplug.sglang_hooks.kv_pages.page_waits import PageWaits, lacking, unique
from cornplug.store.base import Lease, Tier
from cornplug.store.recall import tiers_of


class PageReader:
    """One a rank. Called from SGLang's storage threads; no call raises for want of the store.

    Args:
        stopping: whether SGLang waits for its storage threads' end: it ends its server after 10 s.
        threads: as `PageCopies`'.
        counts_tokens: False for pages whose tokens another reader counts as saved.
        pace: as `PageWaits`'.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        roots: NamespaceRoots,
        index: PageHashIndex,
        mine: RankPages,
        host: HostPages,
        tally: Tally,
        stopping: Callable[[], bool],
        *,
        threads: int = 1,
        counts_tokens: bool = True,
        pace: LoadPace | None = None,
    ) -> None:
        self._counts_tokens = counts_tokens
        self._run, self._roots, self._index = runtime, roots, index
        self._mine, self._tally = mine, tally
        self._copies = PageCopies(mine, host, threads=threads)
        self.stopping = stopping
        self._asking = runtime.another_connection()
        self._waits = PageWaits(runtime, pace, page_tokens=index.page_tokens, entry_bytes=mine.size_bytes)
        self.disk_s = self._waits.disk_s

    def close(self) -> None:
        """End the connection of the scheduler's thread, and the copying threads."""
        self._asking.close()
        self._copies.close()

    def roots(self) -> RootsOfCall:
        """The roots that one call needs."""
        return RootsOfCall(self._roots)

    def keys(self, page: HashedPage, part: PageOverlap, roots: RootsOfCall) -> list[bytes]:
        """The store's keys of a part, newest continuation first. Raises CheckpointError."""
        root = roots.root(page.space)
        return [
            page_key(self._run.secret, root, self._index.page_tokens, link) for link in reversed(part.links)
        ]

    def begins(self, first: str | None, tokens: int) -> bool | None:
        """Whether the store has the page `first`, the first of `tokens` that the engine lacks; None where far
        stores are asked for it.

        Counts the tokens as missed if it is absent. Called on the scheduler's thread, with a second
        connection, so that it waits for no call of the storage threads. Raises CornplugError.
        """
        plan = list(self._plan(self._index.find([first]))) if first is not None else []
        if not plan:
            self._missed("no_page_key", tokens)
            return False
        parts = [keys for _, keys in plan[0]]
        keys = [key for part in parts for key in part]
        tiers = tiers_of(self._asking, keys, deadline_s=self._run.deadline_s)
        there = {key for key, tier in zip(keys, tiers, strict=True) if tier}
        found = all(there.intersection(part) for part in parts)
        if not found:
            absent = lacking(parts, dict(zip(keys, tiers, strict=True)))
            if self._waits.begin(self._asking, absent, tokens=tokens):
                return None
            self._missed("absent", tokens)
        return found

    def count(self, hashes: Sequence[str]) -> tuple[int, int]:
        """How many of these pages, from the first, the store has, and how many of its entries for them are on
        disk only. From the scheduler's thread, as `begins`. Raises CornplugError."""
        wanted = [[keys for _, keys in parts] for parts in self._plan(self._index.find(hashes))]
        keys = list(dict.fromkeys(key for parts in wanted for part in parts for key in part))
        if not keys:
            return 0, 0
        tiers = tiers_of(self._asking, keys, deadline_s=self._run.deadline_s)
        there = {key for key, tier in zip(keys, tiers, strict=True) if tier}
        whole = (all(there.intersection(part) for part in parts) for parts in wanted)
        found = next((i for i, one in enumerate(whole) if not one), len(wanted))
        return found, tiers.count(Tier.DISK)

    def present(self, hashes: Sequence[str]) -> int:
        """How many pages, from the first, the store has whole, once it has read those that are on disk only;
        counts those that it lacks. Raises CornplugError."""
        wanted = [[keys for _, keys in parts] for parts in self._plan(self._index.find(hashes))]
        if not wanted:
            self._missed("no_page_key", len(hashes) * self._index.page_size)
            return 0
        tiers = self._waits.recalled([part for parts in wanted for part in parts])
        there = {key for key, tier in tiers.items() if tier == Tier.MEMORY}
        count = 0
        for whole in wanted:
            if not all(there.intersection(part) for part in whole):
                break
            count += 1
        late = Tier.DISK in tiers.values()
        self._missed("disk_late" if late else "absent", (len(wanted) - count) * self._index.page_size)
        self._missed("no_page_key", (len(hashes) - len(wanted)) * self._index.page_size)
        return count

    def tiers(self, hashes: Sequence[str], *, asking: bool = False, recall: bool = False) -> list[Tier]:
        """Where each of these pages is: absent if a part of it is, on disk if a part is there only; absent
        too behind the first page that has no name in the store. Raises CornplugError.

        Args:
            asking: from the scheduler's thread, as `begins`: far stores are not asked.
            recall: wait for those that are on disk only, as `present`.
        """
        plan = [[keys for _, keys in parts] for parts in self._plan(self._index.find(hashes))]
        wanted = [part for parts in plan for part in parts]
        found: dict[bytes, int] = {}
        if wanted and asking:
            keys = unique(wanted)
            found = dict(
                zip(keys, tiers_of(self._asking, keys, deadline_s=self._run.deadline_s), strict=True)
            )
        elif wanted:
            found = self._waits.recalled(wanted) if recall else self._waits.sought(wanted)
        pages = [
            _farthest([_nearest([Tier(found[key]) for key in part]) for part in parts]) for parts in plan
        ]
        return pages + [Tier.ABSENT] * (len(hashes) - len(pages))

    def count_absent(self, pages: int) -> None:
        """Count pages of SGLang's that the store cannot give."""
        self._missed("absent", pages * self._index.page_size)

    def load(self, hashes: Sequence[str], slots: Sequence[int]) -> int:
        """Copy pages into the host pool, each verified first. Returns how many were copied, from the first.

        `slots` are the first slots of the pages.
        """
        done, reason = 0, ""
        pages = self._index.find(hashes)
        try:
            plan = list(self._plan(pages))
            with self._leased([key for parts in plan for _, keys in parts for key in keys]) as leases:
                jobs, ends = self._jobs(plan, slots, leases)
                whole, error = self._copies.read(jobs, self.stopping)
                done = bisect_right(ends, whole)
                if error is not None:
                    raise error
                if whole < len(jobs):
                    return done
                if len(ends) < min(len(plan), len(slots)):
                    reason = "evicted"
                    return done
            if len(plan) < len(hashes):
                reason = "no_page_key"
        except CodecError as e:
            reason = e.reason
            if e.is_damage:
                damaged = [key for parts in plan[done:] for _, keys in parts for key in keys]
                self._mine.discard(damaged, deadline_s=self._run.background_timeout_s)
        except CornplugError as e:
            reason = e.reason
        finally:
            self._count(done, reason)
        return done

    def borrow(self, page: HashedPage) -> torch.Tensor | None:
        """A page of SGLang's, (heads, layers, planes, tokens, dim), out of a larger one of the
        store; None where the store has none. Raises CornplugError."""
        parts = self._index.overlaps(page)
        if not parts:
            return None
        keys = self.keys(page, parts[0], self.roots())
        with self._leased(keys) as leases:
            lease = next((leases[key] for key in keys if key in leases), None)
            if lease is None:
                return None
            memory = self._mine.memory()
            self._mine.read(lease, memory)
        return memory[..., parts[0].inside, :]

    def _jobs(
        self,
        plan: Sequence[Sequence[tuple[PageOverlap, list[bytes]]]],
        slots: Sequence[int],
        leases: Mapping[bytes, Lease],
    ) -> tuple[list[tuple[Lease, list[PagePart]]], list[int]]:
        """(pages of the store and their places on the host, up to the plan's first page without a lease; of
        each page of the plan how many of these it takes, from the first)"""
        jobs: list[tuple[Lease, list[PagePart]]] = []
        ends: list[int] = []
        at_hand: bytes | None = None
        for parts, slot in zip(plan, slots, strict=False):
            there = self._copies.at(slot)
            for part, keys in parts:
                # Neighbours often lie in one page of the store.
                if at_hand not in keys:
                    at_hand = next((key for key in keys if key in leases), None)
                    if at_hand is None:
                        return jobs, ends
                    jobs.append((leases[at_hand], []))
                jobs[-1][1].append(PagePart(part.inside, there[:, :, :, part.page]))
            ends.append(len(jobs))
        return jobs, ends

    def _plan(self, pages: Sequence[HashedPage | None]) -> Iterator[list[tuple[PageOverlap, list[bytes]]]]:
        """Parts and their keys of each page, up to the first that has no name in the store."""
        made: dict[tuple[CacheNamespace, tuple[bytes, ...]], list[bytes]] = {}
        roots = self.roots()
        for page in pages:
            parts = self._index.overlaps(page) if page is not None else []
            if page is None or not parts:
                return
            for part in parts:
                if (page.space, part.links) not in made:
                    made[page.space, part.links] = self.keys(page, part, roots)
            yield [(part, made[page.space, part.links]) for part in parts]

    @contextmanager
    def _leased(self, keys: Sequence[bytes]) -> Iterator[dict[bytes, Lease]]:
        store, deadline_s = self._run.store, self._run.deadline_s
        unique = list(dict.fromkeys(keys))
        if not unique:
            yield {}
            return
        found = store.lease(unique, ttl_s=self._run.config.store.lease_s, deadline_s=deadline_s)
        leases = [lease for lease in found if lease is not None]
        try:
            yield {lease.key: lease for lease in leases}
        finally:
            # A store that is gone has ended the leases by itself.
            with suppress(StoreUnavailable):
                if leases:
                    store.release([lease.token for lease in leases], deadline_s=deadline_s)

    def _missed(self, reason: str, tokens: int) -> None:
        # In whole pages of the store: no engine could have stored a part of one.
        if pages := tokens // self._index.page_tokens:
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason, by=pages)

    def _count(self, done: int, reason: str) -> None:
        app, tokens = self._run.app, done * self._index.page_size
        if done and self._counts_tokens:
            # In pages of the store, as every other engine counts them.
            pages = max(1, tokens // self._index.page_tokens)
            self._tally.count("cornplug_hits_total", app, KV_PAGE, "store", by=pages)
            self._tally.count("cornplug_saved_tokens_total", app, by=tokens)
        if done:
            moved = tokens * self._mine.size_bytes / self._index.page_tokens
            self._tally.count("cornplug_bytes_total", app, KV_PAGE, "load", by=moved)
        if reason:
            self._tally.count("cornplug_misses_total", app, KV_PAGE, reason)


def _nearest(tiers: Sequence[Tier]) -> Tier:
    """Where one of several entries is, any of which will do."""
    return min((tier for tier in tiers if tier), default=Tier.ABSENT)


def _farthest(tiers: Sequence[Tier]) -> Tier:
    """Where several entries are, all of which are needed."""
    return Tier.ABSENT if Tier.ABSENT in tiers else max(tiers)
