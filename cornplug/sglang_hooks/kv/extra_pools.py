"""SGLang's storage interface except the operations for pages of the model's main pool: the operations for one
additional pool (windows, or a draft model's KV), and operations that are not supported."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime, count_as_miss
from cornplug.metrics import Tally
from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.kv.window_pool import WindowPool
from cornplug.sglang_hooks.kv_pages import draft_pages
from cornplug.sglang_hooks.kv_pages.draft_pages import DraftPages
from cornplug.sglang_hooks.kv_pages.reader import PageReader


class BatchOnlyStorage(HiCacheStorage):
    """Storage whose operations on single values do nothing, because pages are transferred only in batches."""

    def exists(self, key: str) -> bool:
        """Return whether the store has this page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Return None, because pages are loaded only with the `v1` and `v2` functions."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None] | int:
        """Return None for each key, because pages are loaded only with the `v1` and `v2` functions."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return False, because pages are saved only with the `v1` and `v2` functions."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False, because pages are saved only with the `v1` and `v2` functions."""
        return False

    def clear(self) -> bool:
        """Return False, because other engines use the store too."""
        logger.warning("cornplug: the store was not cleared, because other engines use it too")
        return False


class ExtraPools(BatchOnlyStorage):
    """Storage for the model's main pool and one additional pool.

    `batch_get_v1` and `batch_set_v1` copy pages of the main pool. The corresponding `v2` functions copy pages
    of the additional pool (windows, or a draft model's KV).
    """

    def __init__(self, runtime: EngineRuntime, tally: Tally) -> None:
        self._run, self._tally = runtime, tally
        self._reader: PageReader | None = None
        self._windows: WindowPool | None = None
        self._draft_model = draft_pages.get_draft_model()
        self._draft_pages: DraftPages | None = None

    @property
    def lacks_draft(self) -> bool:
        """Whether this engine has a draft model whose pool SGLang has not registered."""
        return self._draft_model is not None and self._draft_pages is None

    @abstractmethod
    def _may_share(self) -> bool: ...

    @abstractmethod
    def _may_save(self) -> bool: ...

    @abstractmethod
    def _catch_errors(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that catches and counts an unexpected error in a "lookup", "load" or
        "save".

        Without it, the error would end one of SGLang's threads.
        """

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the number of leading pages for which the store has both the main pool's page and the
        additional pool's page.

        For windows, the store needs only the window at the end of the leading pages. The result is empty for
        pools other than windows and a draft model's KV.
        """
        if not pool_transfers:
            return PoolTransferResult(self.batch_exists(keys, extra_info), {})
        if self._windows is not None:
            at_start = extra_info is None or not extra_info.prefix_keys
            return self._lookup_with_windows(self._windows, keys, pool_transfers, at_start=at_start)
        if self._draft_pages is None or {transfer.name for transfer in pool_transfers} != {PoolName.DRAFT}:
            return PoolTransferResult.empty()
        found, whole = 0, self.batch_exists(keys, extra_info)
        with self._catch_errors("lookup"):
            found = self._draft_pages.count_present(keys[:whole])
        return PoolTransferResult(found, {PoolName.DRAFT: found})

    def _lookup_with_windows(
        self, windows: WindowPool, keys: list[str], transfers: list[PoolTransfer], *, at_start: bool
    ) -> PoolTransferResult:
        ends = list[int]()
        if self._reader is not None and self._may_share():
            with self._catch_errors("lookup"), count_as_miss(self._tally, self._run.app, KV_PAGE):
                ends = windows.find_hits(self._reader, keys, transfers, at_start=at_start)
        if not ends:
            return PoolTransferResult.empty()
        return PoolTransferResult(ends[-1], {PoolName.KV: ends[-1], PoolName.SWA: ends[-1]}, ends)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill host pages of an additional pool from the store.

        Returns a bool per page, by pool: whether the host page has verified KV now.
        """
        done = {str(transfer.name): [False] * len(transfer.keys or ()) for transfer in transfers}
        if self._windows is not None and self._may_share():
            began = time.monotonic()
            with self._catch_errors("load"):
                done |= self._windows.fetch(transfers)
            self._tally.observe("cornplug_wait_seconds", time.monotonic() - began, self._run.app, KV_PAGE)
        if self._draft_pages is not None and self._may_share():
            with self._catch_errors("load"):
                done |= self._draft_pages.fetch(transfers)
        return done

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Offer pages of an additional pool to the store.

        For windows, always returns True for each page, for the same reason as `batch_set_v1`.
        """
        kept = self._windows is not None
        if self._windows is not None and self._may_save():
            with self._catch_errors("save"):
                self._windows.offer(transfers)
        if self._draft_pages is not None and self._may_save():
            with self._catch_errors("save"):
                return self._draft_pages.offer(transfers)
        return {str(transfer.name): [kept] * len(transfer.keys or ()) for transfer in transfers}
