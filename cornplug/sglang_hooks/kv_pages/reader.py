"""Looks up pages in the store, and copies them to SGLang's host pool.

A lookup may wait for pages that are on disk or in far stores (remote storage).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import torch

from cornplug.engine_common.load_policy import EwmaRate
from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CodecError, CornplugError, StoreUnavailable
from cornplug.identity import page_key
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.namespace_roots import CallRoots, NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice
from cornplug.sglang_hooks.kv_pages.page_hash_index import (
    CacheNamespace,
    HashedPage,
    PageHashIndex,
    PageOverlap,
)
from cornplug.store.base import Lease, Store, Tier
from cornplug.store.payload import FAR_WAIT_S, LEASE_S, look_up_far, recall_and_wait

_DISK_RATE_TTL_S: Final = 60.0
"""Seconds after which measured disk speeds expire, so that reads from a slow disk are tried again."""
_RECALL_PAUSE_S: Final = 5.0
"""Seconds without waits for disks and far stores after a disk read has exceeded its deadline, because each
wait delays a request."""


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Objects and settings that all of a rank's pools use."""

    runtime: EngineRuntime
    index: PageHashIndex
    tally: Tally
    pace: LoadPace
    """Measures the engine's steps, in order to estimate the time to compute a page."""
    is_stopping: Callable[[], bool]
    """Returns whether SGLang is waiting for its storage threads to end. After 10 s, SGLang exits."""
    only_seen: bool = False
    """Whether to save only pages that an earlier request used (see `PagePublisher`)."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """A host pool of one rank, and the part of the store's pages that this rank holds."""

    rank_pages: RankPages
    host: HostPages
    threads: int = 1
    """Number of threads that copy pages in parallel (see `PageCopies`)."""


class PageWaits:
    """Waits of one `PageReader` for pages on disk and in far stores.

    Args:
        pace: measured durations of this engine, or None if they are not measured.
        entry_bytes: number of bytes that this rank reads from a store page.
    """

    def __init__(
        self, runtime: EngineRuntime, pace: LoadPace | None, *, page_tokens: int, entry_bytes: int
    ) -> None:
        self._run, self._pace = runtime, pace
        self._page_tokens, self._entry_bytes = page_tokens, entry_bytes
        self._disk_pace = EwmaRate()
        """Rate at which the store reads from its disk for this rank."""
        self._paused_until_s = 0.0

    def disk_s(self, entries: int) -> float:
        """Return the estimated seconds for the store to read `entries` entries from disk.

        Returns 0 if no recent read was measured.
        """
        return self._disk_pace.estimate_s(entries * self._entry_bytes, max_age_s=_DISK_RATE_TTL_S) or 0.0

    def start_far_lookup(self, store: Store, keys: Sequence[bytes], *, tokens: int) -> bool:
        """Query far stores for absent keys. Return whether a storage thread should wait for the replies.

        `keys` are the keys of the first of the absent pages, which have `tokens` tokens. Called on the
        scheduler's thread. Does not wait.
        """
        if not store.is_far_up or time.monotonic() < self._paused_until_s:
            return False
        first_s = self.disk_s(max(1, tokens // self._page_tokens))
        if self._pace is not None and not self._pace.pays(tokens, first_s=first_s):
            return False
        return bool(store.start_far_lookup(keys))

    def look_up_far(self, parts: Sequence[Sequence[bytes]]) -> dict[bytes, int]:
        """Return a `Tier` for each key, after waiting for far stores. Raises StoreUnavailable.

        Args:
            parts: alternative keys for each part of a page. A part is available if any of its keys is stored.
        """
        store, deadline_s, began_s = self._run.store, self._run.deadline_s, time.monotonic()
        keys = unique_keys(parts)
        found = dict(zip(keys, store.tiers(keys, deadline_s=deadline_s), strict=True))
        if not store.is_far_up or began_s < self._paused_until_s:
            return found
        if absent := missing_keys(parts, found):
            tokens = len(absent) * self._page_tokens
            within_s = FAR_WAIT_S if self._pace is None else self._pace.far_wait_s(tokens)
            tiers = look_up_far(store, absent, within_s=within_s, deadline_s=deadline_s)
            found |= dict(zip(absent, tiers, strict=True))
            self._record_wait(began_s)
        return found

    def recall_and_wait(self, parts: Sequence[Sequence[bytes]]) -> dict[bytes, int]:
        """Return the tier of each key like `look_up_far`, after also waiting for entries on disk.

        If an entry is not read in time, calls in the next few seconds do not wait.
        """
        store, deadline_s = self._run.store, self._run.deadline_s
        if time.monotonic() < self._paused_until_s:
            keys = unique_keys(parts)
            return dict(zip(keys, store.contains(keys, deadline_s=deadline_s), strict=True))
        found, began_s = self.look_up_far(parts), time.monotonic()
        if on_disk := [key for key, tier in found.items() if tier == Tier.DISK]:
            patience_s = self._run.background_timeout_s
            tiers = recall_and_wait(store, on_disk, within_s=patience_s, deadline_s=deadline_s)
            found |= dict(zip(on_disk, tiers, strict=True))
            took_s, left = time.monotonic() - began_s, tiers.count(Tier.DISK)
            self._disk_pace.add_sample(max(1, len(on_disk) - left) * self._entry_bytes, took_s)
            self._record_wait(began_s)
            if left:
                self._paused_until_s = time.monotonic() + _RECALL_PAUSE_S
        return found

    def _record_wait(self, began_s: float) -> None:
        if self._pace is not None:
            self._pace.record_wait(time.monotonic() - began_s)


def unique_keys(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return the keys of all parts, in order and without duplicates."""
    return list(dict.fromkeys(key for part in parts for key in part))


def missing_keys(parts: Sequence[Sequence[bytes]], found: Mapping[bytes, int]) -> list[bytes]:
    """Return the keys of the parts for which the store has no entry."""
    return unique_keys([part for part in parts if not any(found[key] for key in part)])


class PageReader:
    """Reads pages for one rank. Called on SGLang's storage threads, unless a method's docstring says
    otherwise.

    Args:
        counts_tokens: whether to count hits and saved tokens. False for pages whose tokens another reader
            counts.
    """

    def __init__(
        self, context: PoolContext, roots: NamespaceRoots, pool: RankPool, *, counts_tokens: bool = True
    ) -> None:
        self._counts_tokens = counts_tokens
        self._run, self._roots, self._index = context.runtime, roots, context.index
        self._rank_pages, self._tally = pool.rank_pages, context.tally
        self._copies = PageCopies(pool.rank_pages, pool.host, threads=pool.threads)
        self.is_stopping = context.is_stopping
        self._scheduler_store = self._run.open_connection()
        self._waits = PageWaits(
            self._run,
            context.pace,
            page_tokens=self._index.page_tokens,
            entry_bytes=self._rank_pages.size_bytes,
        )
        self.disk_s = self._waits.disk_s

    def close(self) -> None:
        """Close the store connection of the scheduler's thread, and stop the threads that copy pages."""
        self._scheduler_store.close()
        self._copies.close()

    def roots(self) -> CallRoots:
        """Return an object that caches roots during one call."""
        return CallRoots(self._roots)

    def store_keys(self, page: HashedPage, part: PageOverlap, roots: CallRoots) -> list[bytes]:
        """Return the store keys of the store page that overlaps `page` in `part`.

        If the sequence has several continuations, there are several keys, newest first. Raises
        CheckpointError if the namespace has no root.
        """
        root = roots.root(page.space)
        return [
            page_key(self._run.secret, root, self._index.page_tokens, link) for link in reversed(part.links)
        ]

    def has_first_page(self, first: str | None, tokens: int) -> bool | None:
        """Return whether the store has the page `first`, or None if far stores were queried for the page.

        `first` is the first page of `tokens` tokens that the engine lacks. If the page is absent, all these
        tokens are counted as misses. Called on the scheduler's thread, with a second connection, and
        therefore does not wait for calls of the storage threads. Raises CornplugError.
        """
        plan = list(self._keyed_overlaps(self._index.find([first]))) if first is not None else []
        if not plan:
            self._count_misses("no_page_key", tokens)
            return False
        parts = [keys for _, keys in plan[0]]
        keys = [key for part in parts for key in part]
        tiers = self._scheduler_store.tiers(keys, deadline_s=self._run.deadline_s)
        there = {key for key, tier in zip(keys, tiers, strict=True) if tier}
        found = all(there.intersection(part) for part in parts)
        if not found:
            absent = missing_keys(parts, dict(zip(keys, tiers, strict=True)))
            if self._waits.start_far_lookup(self._scheduler_store, absent, tokens=tokens):
                return None
            self._count_misses("absent", tokens)
        return found

    def count_leading(self, hashes: Sequence[str]) -> tuple[int, int]:
        """Return (number of leading pages that the store has, number of entries that are only on disk).

        Called on the scheduler's thread with the second connection. Raises CornplugError.
        """
        wanted = [[keys for _, keys in parts] for parts in self._keyed_overlaps(self._index.find(hashes))]
        keys = list(dict.fromkeys(key for parts in wanted for part in parts for key in part))
        if not keys:
            return 0, 0
        tiers = self._scheduler_store.tiers(keys, deadline_s=self._run.deadline_s)
        there = {key for key, tier in zip(keys, tiers, strict=True) if tier}
        whole = (all(there.intersection(part) for part in parts) for parts in wanted)
        found = next((i for i, one in enumerate(whole) if not one), len(wanted))
        return found, tiers.count(Tier.DISK)

    def count_present(self, hashes: Sequence[str]) -> int:
        """Return how many leading pages the store has in memory, after reading pages from disk.

        Missing pages are counted as misses. Raises CornplugError.
        """
        wanted = [[keys for _, keys in parts] for parts in self._keyed_overlaps(self._index.find(hashes))]
        if not wanted:
            self._count_misses("no_page_key", len(hashes) * self._index.page_size)
            return 0
        tiers = self._waits.recall_and_wait([part for parts in wanted for part in parts])
        there = {key for key, tier in tiers.items() if tier == Tier.MEMORY}
        count = 0
        for whole in wanted:
            if not all(there.intersection(part) for part in whole):
                break
            count += 1
        late = Tier.DISK in tiers.values()
        self._count_misses("disk_late" if late else "absent", (len(wanted) - count) * self._index.page_size)
        self._count_misses("no_page_key", (len(hashes) - len(wanted)) * self._index.page_size)
        return count

    def tiers(self, hashes: Sequence[str], *, on_scheduler: bool = False, recall: bool = False) -> list[Tier]:
        """Return the tier of each of these pages.

        A page is absent if any of its parts is absent, and on disk if any of its parts is only on disk. The
        first page without a key and all later pages count as absent. Raises CornplugError.

        Args:
            on_scheduler: whether the caller is on the scheduler's thread. If so, the second connection is
                used, and far stores are not queried.
            recall: whether to wait for pages that are only on disk.
        """
        plan = [[keys for _, keys in parts] for parts in self._keyed_overlaps(self._index.find(hashes))]
        wanted = [part for parts in plan for part in parts]
        found: dict[bytes, int] = {}
        if wanted and on_scheduler:
            keys = unique_keys(wanted)
            found = dict(
                zip(keys, self._scheduler_store.tiers(keys, deadline_s=self._run.deadline_s), strict=True)
            )
        elif wanted:
            found = self._waits.recall_and_wait(wanted) if recall else self._waits.look_up_far(wanted)
        pages = [
            _slowest_tier([_fastest_tier([Tier(found[key]) for key in part]) for part in parts])
            for parts in plan
        ]
        return pages + [Tier.ABSENT] * (len(hashes) - len(pages))

    def count_absent(self, pages: int) -> None:
        """Count `pages` SGLang pages as misses, because the store does not have them."""
        self._count_misses("absent", pages * self._index.page_size)

    def load(self, hashes: Sequence[str], slots: Sequence[int]) -> int:
        """Copy verified pages to the host pool, and return the number of leading pages that were copied.

        `slots` are the pages' first slots in the host pool. Does not raise an exception if the store fails.
        """
        done, reason = 0, ""
        pages = self._index.find(hashes)
        try:
            plan = list(self._keyed_overlaps(pages))
            with self._leasing([key for parts in plan for _, keys in parts for key in keys]) as leases:
                jobs, ends = self._plan_copies(plan, slots, leases)
                whole, error = self._copies.read(jobs, self.is_stopping)
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
                self._rank_pages.discard(damaged, deadline_s=self._run.background_timeout_s)
        except CornplugError as e:
            reason = e.reason
        finally:
            self._count_loaded(done, reason)
        return done

    def read_page(self, page: HashedPage) -> torch.Tensor | None:
        """Return the KV of an SGLang page, read from a larger store page. Return None if it is not stored.

        The shape is (heads, layers, planes, tokens, dim). Raises CornplugError.
        """
        parts = self._index.overlaps(page)
        if not parts:
            return None
        keys = self.store_keys(page, parts[0], self.roots())
        with self._leasing(keys) as leases:
            lease = next((leases[key] for key in keys if key in leases), None)
            if lease is None:
                return None
            memory = self._rank_pages.allocate_shard()
            self._rank_pages.read(lease, memory)
        return memory[..., parts[0].store_slice, :]

    def _plan_copies(
        self,
        plan: Sequence[Sequence[tuple[PageOverlap, list[bytes]]]],
        slots: Sequence[int],
        leases: Mapping[bytes, Lease],
    ) -> tuple[list[tuple[Lease, list[PageSlice]]], list[int]]:
        """Return the store pages to copy, each with its memory in the host pool, and the number of leading
        store pages that each page of the plan needs.

        The store pages end at the plan's first page without a lease.
        """
        jobs: list[tuple[Lease, list[PageSlice]]] = []
        ends: list[int] = []
        at_hand: bytes | None = None
        for parts, slot in zip(plan, slots, strict=False):
            there = self._copies.host_page(slot)
            for part, keys in parts:
                # Adjacent pages are often in the same store page.
                if at_hand not in keys:
                    at_hand = next((key for key in keys if key in leases), None)
                    if at_hand is None:
                        return jobs, ends
                    jobs.append((leases[at_hand], []))
                jobs[-1][1].append(PageSlice(part.store_slice, there[:, :, :, part.sglang_slice]))
            ends.append(len(jobs))
        return jobs, ends

    def _keyed_overlaps(
        self, pages: Sequence[HashedPage | None]
    ) -> Iterator[list[tuple[PageOverlap, list[bytes]]]]:
        """Yield the parts of each page with their keys, up to the first page that has no keys."""
        made: dict[tuple[CacheNamespace, tuple[bytes, ...]], list[bytes]] = {}
        roots = self.roots()
        for page in pages:
            parts = self._index.overlaps(page) if page is not None else []
            if page is None or not parts:
                return
            for part in parts:
                if (page.space, part.links) not in made:
                    made[page.space, part.links] = self.store_keys(page, part, roots)
            yield [(part, made[page.space, part.links]) for part in parts]

    @contextmanager
    def _leasing(self, keys: Sequence[bytes]) -> Iterator[dict[bytes, Lease]]:
        store, deadline_s = self._run.store, self._run.deadline_s
        unique = list(dict.fromkeys(keys))
        if not unique:
            yield {}
            return
        found = store.lease(unique, ttl_s=LEASE_S, deadline_s=deadline_s)
        leases = [lease for lease in found if lease is not None]
        try:
            yield {lease.key: lease for lease in leases}
        finally:
            # If the store has exited, its leases have already ended.
            with suppress(StoreUnavailable):
                if leases:
                    store.release([lease.token for lease in leases], deadline_s=deadline_s)

    def _count_misses(self, reason: str, tokens: int) -> None:
        # Count complete store pages, because engines never store an incomplete page.
        if pages := tokens // self._index.page_tokens:
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason, amount=pages)

    def _count_loaded(self, done: int, reason: str) -> None:
        app, tokens = self._run.app, done * self._index.page_size
        if done and self._counts_tokens:
            # Count store pages, as all other engines do.
            pages = max(1, tokens // self._index.page_tokens)
            self._tally.count("cornplug_hits_total", app, KV_PAGE, "store", amount=pages)
            self._tally.count("cornplug_saved_tokens_total", app, amount=tokens)
        if done:
            moved = tokens * self._rank_pages.size_bytes / self._index.page_tokens
            self._tally.count("cornplug_bytes_total", app, KV_PAGE, "load", amount=moved)
        if reason:
            self._tally.count("cornplug_misses_total", app, KV_PAGE, reason)


def _fastest_tier(tiers: Sequence[Tier]) -> Tier:
    """Return the best tier among several entries of which one is sufficient."""
    return min((tier for tier in tiers if tier), default=Tier.ABSENT)


def _slowest_tier(tiers: Sequence[Tier]) -> Tier:
    """Return the worst tier among several entries that are all necessary."""
    return Tier.ABSENT if Tier.ABSENT in tiers else max(tiers)
