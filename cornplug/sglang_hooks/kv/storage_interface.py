"""The parts of SGLang's storage interface that shared pages have no use for."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from cornplug.sglang_hooks.compat import logger


class PagesOnly(HiCacheStorage):
    """A storage that SGLang asks for pages in batches, and whose entries it does not move one by one."""

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
