"""libCacheSim's LRU as a cache that a trace is replayed against."""

from __future__ import annotations

import pytest

from cornplug.replay import TraceRequest


class LRU:
    """An entry that misses is inserted; one larger than the cache is not."""

    def __init__(self, capacity_bytes: int) -> None:
        self._lib = pytest.importorskip("libcachesim")
        self._cache = self._lib.LRU(cache_size=capacity_bytes)

    def serve(self, request: TraceRequest) -> list[bool]:
        return [self._get(access.key, access.size_bytes) for access in request.accesses]

    def _get(self, key: int, size_bytes: int) -> bool:
        wanted = self._lib.Request()
        wanted.obj_id, wanted.obj_size = key, size_bytes
        return bool(self._cache.get(wanted))
