"""The table of sightings: bounded, and quick to forget under a flood."""

from __future__ import annotations

from cornplug.store.base import WriterPart
from cornplug.store.daemon.reservations import Sightings
from cornplug.testing.store import key_of


def test_sightings_again_remembers_as_many_keys_as_it_says() -> None:
    seen = Sightings()
    keys = [key_of(name) for name in range(50_000)]
    assert not any(seen.check_and_record(each, None) for each in keys)
    # Some buckets of four had five of them.
    assert sum(seen.check_and_record(each, None) for each in keys) > 0.98 * len(keys)


def test_sightings_flood_forgets_and_takes_no_memory() -> None:
    # A key is forgotten when four later keys have come to its bucket: one key in fifty is not.
    seen, keys = Sightings(), [key_of(f"early {i}") for i in range(100)]
    assert not any(seen.check_and_record(key, None) for key in keys)
    size = len(seen._table)
    for name in range(600_000):
        seen.check_and_record(name.to_bytes(32), None)
    assert len(seen._table) == size == 4 << 16
    assert sum(seen.check_and_record(key, None) for key in keys) < 20


def test_sightings_key_in_use_outlives_the_others_of_its_bucket() -> None:
    seen = Sightings()
    seen.check_and_record(key_of("hot"), None)
    for name in range(500_000):
        seen.check_and_record(name.to_bytes(32), None)
        if name % 10_000 == 0:
            assert seen.check_and_record(key_of("hot"), None)


def test_sightings_parts_of_groups_are_apart() -> None:
    seen, groups = Sightings(), [bytes([i]) * 16 for i in range(3)]
    first = [seen.check_and_record(key_of("a"), WriterPart(groups[0], i, 4)) for i in range(4)]
    assert first == [False] * 4
    assert seen.check_and_record(key_of("a"), WriterPart(groups[1], 3, 4))
    assert seen.check_and_record(key_of("a"), WriterPart(groups[0], 0, 4))
