"""A server between hosts changes every record on its way, 1,000 times in each way: it gives misses, or the
entry itself, and reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cornplug.store.base import Tier
from cornplug.store.payload import recall_and_wait
from cornplug.testing.store import DEADLINE_S, key_of
from devkit.far_servers import RedisServer

from ..conftest import eventually
from ..disk.disk_stage import get, payload_of, put
from .far_stage import Host, client_of
from .record_proxy import WAYS, RecordProxy

ENTRIES = 1000
SIZE_BYTES = 512
APP = "tenant whose name stays here"


@pytest.fixture
def proxy(redis: RedisServer) -> Iterator[RecordProxy]:
    one = RecordProxy(redis.port)
    yield one
    one.close()


@pytest.mark.more
@pytest.mark.timeout(240)
def test_far_tier_proxy_that_changes_records_gets_counted_misses_and_reads_nothing(
    host: Callable[..., Host], redis: RedisServer, proxy: RecordProxy
) -> None:
    first = host(proxy.url)
    keys = [key_of(name) for name in range(ENTRIES)]
    for rounds in (1, 2):
        for name in range(ENTRIES):
            put(first.store, name, SIZE_BYTES, APP)
        eventually(lambda rounds=rounds: first.written(rounds * ENTRIES))  # type: ignore[misc]
        if rounds == 1:
            names = client_of(redis).keys("cp1/*")
            proxy.older = dict(zip(names, client_of(redis).mget(names), strict=True))
            first.store.delete(keys, deadline_s=DEADLINE_S)
            eventually(lambda: client_of(redis).dbsize() == 0)
    for how in WAYS:
        proxy.how, proxy.changed = how, 0
        second = host(proxy.url)
        second.store.start_far_lookup(keys)
        eventually(lambda second=second: second.far().asks.get("found", 0) == ENTRIES)  # type: ignore[misc]
        tiers = recall_and_wait(second.store, keys, within_s=60, deadline_s=DEADLINE_S)
        assert proxy.changed == ENTRIES
        if how == "replay":
            # Keys are digests: an older record of a key is the same entry.
            assert second.far().reads == {"read": ENTRIES}
            for name in range(0, ENTRIES, 50):
                assert get(second.store, name) == payload_of(name, SIZE_BYTES)
        else:
            assert second.far().reads == {"damaged": ENTRIES}
            assert tiers == bytes([Tier.ABSENT] * ENTRIES)
        assert second.far().answers
        second.end()
    heard = bytes(proxy.heard)
    assert b"cp1/" in heard
    assert APP.encode() not in heard
    for name in range(0, ENTRIES, 50):
        for told in (payload_of(name, SIZE_BYTES)[:16], key_of(name), key_of(name).hex().encode()):
            assert told not in heard
