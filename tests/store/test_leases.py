"""Leases in columns are the leases that a store gave, one by one."""

from __future__ import annotations

import pickle

import pytest

from cornplug.store.base import NO_LOCATION, Lease, Leases, PayloadLocation, encode_location
from cornplug.testing.store_writing import key_of

ARENA = b"a" * 16


def part(token: int, *names: object) -> Leases:
    """An answer; the store lacks the names that are None."""
    metas = [None if name is None else str(name).encode() for name in names]
    places = [NO_LOCATION if name is None else encode_location(at(name)) for name in names]
    tokens = [token if any(metas) else 0] * len(names)
    return Leases(ARENA, [key_of(name) for name in names], metas, b"".join(places), tokens)


def at(name: object) -> PayloadLocation:
    return PayloadLocation(ARENA, 64 * len(str(name)), 9, 1 << 63)


def lease(token: int, name: object) -> Lease:
    return Lease(token, key_of(name), str(name).encode(), at(name))


WHOLE = Leases.concat(ARENA, [part(5, "a", None, "bb"), part(6, None), part(7, "ccc")])
LIST = [lease(5, "a"), None, lease(5, "bb"), None, lease(7, "ccc")]


def test_leases_joined_answers_are_one_sequence() -> None:
    assert list(WHOLE) == LIST
    assert len(WHOLE) == 5
    assert WHOLE[-1] == LIST[-1]
    assert Leases.concat(ARENA, []).unique_tokens == []
    with pytest.raises(IndexError):
        WHOLE[5]


@pytest.mark.parametrize("cut", [slice(1, 3), slice(2, None), slice(-2, None), slice(3, 1), slice(0, 99)])
def test_leases_slice_is_that_of_the_list(cut: slice) -> None:
    assert list(WHOLE[cut]) == LIST[cut]
    assert len(WHOLE[cut].sizes) == len(LIST[cut])


def test_leases_held_tokens_are_each_named_once() -> None:
    assert WHOLE.unique_tokens == [5, 7]


def test_leases_travel_to_another_process_whole() -> None:
    assert list(pickle.loads(pickle.dumps(WHOLE))) == LIST
