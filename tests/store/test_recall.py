"""Waits for entries on disk, and reads behind them."""

from __future__ import annotations

import time

import pytest
from keyed_store import KeyedStore
from time_limits import TimeLimits

from cornplug.store.base import Tier
from cornplug.store.payload import get_payload, recall_and_wait
from cornplug.testing.store import key_of, put

from .shelved_store import ShelvedStore


@pytest.fixture
def store() -> ShelvedStore:
    memory = KeyedStore(capacity_bytes=1 << 20)
    found = ShelvedStore(memory.connect())
    assert put(found, bytes(range(256)) * 256, 1) == "stored"  # type: ignore[arg-type]
    found.shelve_all(memory)
    return found


def test_recalled_entries_come_within_the_time(store: ShelvedStore) -> None:
    wanted = [key_of("none"), key_of("e")]
    assert store.tiers(wanted, deadline_s=1) == bytes([Tier.ABSENT, Tier.DISK])
    assert recall_and_wait(store, wanted, within_s=10, deadline_s=1) == bytes([Tier.ABSENT, Tier.MEMORY])
    assert store.recalls == [[key_of("e")]], "asked for once"


def test_recalled_entry_that_never_comes_costs_the_time_given(
    store: ShelvedStore, within: TimeLimits
) -> None:
    store.looks, began_s = None, time.monotonic()
    with within(5):
        assert recall_and_wait(store, [key_of("e")], within_s=0.1, deadline_s=1) == bytes([Tier.DISK])
    assert time.monotonic() - began_s >= 0.1


def test_recalled_of_store_without_disk_is_its_contains() -> None:
    memory = KeyedStore(capacity_bytes=1 << 20).connect()
    put(memory, bytes(4096), 1)
    assert not memory.has_disk
    assert recall_and_wait(memory, [key_of("e"), key_of("f")], within_s=10, deadline_s=1) == b"\1\0"


@pytest.mark.parametrize(("recall_s", "found"), [(None, False), (0.0, False), (10.0, True)])
def test_get_payload_of_entry_on_disk_waits_as_long_as_it_may(
    store: ShelvedStore, recall_s: float | None, found: bool
) -> None:
    payload = get_payload(store, key_of("e"), deadline_s=1, recall_s=recall_s)
    assert (payload is not None) == found
    assert len(store.recalls) == (recall_s is not None)
