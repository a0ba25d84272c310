"""One account's flood evicts its own entries only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.execution.result_cache import ResultCache, StoreQuota
from cornplug.qos import DEFAULT_CLASS, QosCaller
from cornplug.store.base import Store
from cornplug.store.memory import MemoryStore

from ..conftest import MakeEncoder, Requests

ROWS = torch.ones(64, 256)
"""64 KiB."""


@pytest.fixture
def store() -> Store:
    return MemoryStore(capacity_bytes=4 << 20).connect()


def key(account: str, n: int) -> bytes:
    return account.encode().ljust(28, b".") + n.to_bytes(4, "big")


def there(store: Store, account: str, numbers: range) -> int:
    return sum(store.contains([key(account, n) for n in numbers], deadline_s=1))


def publish(cache: ResultCache, account: str | None, numbers: range, name: str = "") -> None:
    for n in numbers:
        assert cache.publish(
            PayloadKind.EMBEDDING, key(name or str(account), n), ROWS, "http", account=account
        )


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_store_quota_flood_evicts_own_entries_only(store: Store, part: float) -> None:
    cache = ResultCache(store, deadline_s=1.0, account_fraction=part)
    publish(cache, None, range(10), "engine")
    publish(cache, "acme", range(10))
    publish(cache, "flood", range(200))
    # With the whole store for each, as before there were accounts, all that was there is gone.
    kept = 10 if part < 1 else 0
    assert there(store, "engine", range(10)) == there(store, "acme", range(10)) == kept
    newest = there(store, "flood", range(200 - 15, 200))
    assert newest == 15
    if part < 1:
        assert store.stat(deadline_s=1).evictions == 0
        assert 14 <= there(store, "flood", range(200)) <= 16


def test_store_quota_entry_over_the_bound_is_not_published(store: Store) -> None:
    cache = ResultCache(store, deadline_s=1.0, account_fraction=0.01)
    failed: list[str] = []
    cache.on_failure = failed.append
    assert not cache.publish(PayloadKind.EMBEDDING, key("a", 1), ROWS, "http", account="a")
    assert failed == ["over_quota"]
    assert cache.publish(PayloadKind.EMBEDDING, key("e", 1), ROWS, "engine")


def test_store_quota_bound_follows_capacity_and_counts_once() -> None:
    now, deleted = [0.0], []

    class Measured:
        capacity_bytes = 1000

        def stat(self, deadline_s: float) -> Any:
            return self

        def delete(self, keys: list[bytes], deadline_s: float) -> int:
            deleted.extend(keys)
            return len(keys)

    measured = Measured()
    quota = StoreQuota(measured, 0.5, deadline_s=1.0, clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(10):
        assert quota.evict_for("a", 100)
        quota.record_published("a", b"same", 100)
    quota.record_published("a", b"next", 300)
    assert quota.evict_for("a", 100)
    assert deleted == []
    assert quota.evict_for("a", 101)
    assert deleted == [b"same"]
    assert not quota.evict_for("a", 501)
    measured.capacity_bytes = 2000
    assert not quota.evict_for("a", 501)
    now[0] = 60
    assert quota.evict_for("a", 501)


def test_encoder_http_requests_have_account_engines_none(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = make_encoder(store)
    seen: list[str | None] = []
    real = ResultCache.publish

    def publish(cache: ResultCache, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["account"])
        return real(cache, *args, **kwargs)

    monkeypatch.setattr(ResultCache, "publish", publish)
    for n, caller in enumerate(
        (None, QosCaller(qos=DEFAULT_CLASS), QosCaller(qos=DEFAULT_CLASS, tenant="acme"))
    ):
        encoder.submit(request_for(llava_pair[0], n), caller=caller).result(60)
    assert list(dict.fromkeys(seen)) == [None, "class default", "tenant acme"]
