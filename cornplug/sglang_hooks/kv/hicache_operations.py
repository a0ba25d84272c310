"""The parts of SGLang's storage interface beside the model's own pages.

Of further pools a draft model's is stored with the model's. For all else each operation says that it does
nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.kv import draft_pages
from cornplug.sglang_hooks.kv.draft_pages import DraftPages


class HiCacheOperations(HiCacheStorage):
    """A storage whose pages move by `batch_get_v1` and `batch_set_v1`, and a draft's by their siblings."""

    def __init__(self) -> None:
        self._drafter = draft_pages.announced()
        self._draft: DraftPages | None = None

    @property
    def lacks_draft(self) -> bool:
        """Whether a draft model runs beside this engine's, and its pool is not here."""
        return self._drafter is not None and self._draft is None

    @abstractmethod
    def _may_share(self) -> bool: ...

    @abstractmethod
    def _may_save(self) -> bool: ...

    # -- with further pools: a draft's, and no other ------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """As `batch_exists`, of pages that the store has for a draft's pool too. Of others it has none."""
        if not pool_transfers:
            return PoolTransferResult(self.batch_exists(keys, extra_info), {})
        if self._draft is None or {transfer.name for transfer in pool_transfers} != {PoolName.DRAFT}:
            return PoolTransferResult.empty()
        found = self._draft.present(keys[: self.batch_exists(keys, extra_info)])
        return PoolTransferResult(found, {PoolName.DRAFT: found})

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, of a draft's pages. Those of other pools are not stored."""
        if self._draft is not None and self._may_share():
            return self._draft.get(transfers)
        return {str(transfer.name): [False] * len(transfer.keys or ()) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, of a draft's pages. Those of other pools are not stored."""
        if self._draft is not None and self._may_save():
            return self._draft.set(transfers)
        return {str(transfer.name): [False] * len(transfer.keys or ()) for transfer in transfers}

    # -- operations that pages have no use for --------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether the store has this page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """None: pages move by `batch_get_v1` only."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None] | int:
        """None of them, as `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """False: pages move by `batch_set_v1` only."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """False, as `set`."""
        return False

    def clear(self) -> bool:
        """False: the store is also others', and is not this engine's to empty."""
        logger.warning("cornplug: the host's store is shared and stays as it is")
        return False
