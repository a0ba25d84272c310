"""A client learns that no answer of a far store is due any more, and waits no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug.store import messages, payload
from cornplug.store.base import Tier
from cornplug.store.daemon.entry_watchers import EntryTableWriter
from cornplug.store.entry_table import TICKETS, MappedEntryTable, TableShape
from cornplug.store.far import far_lookup_queue
from cornplug.store.far.far_lookup_queue import FarLookupQueue
from cornplug.store.payload import recall_and_wait
from cornplug.testing.store import DEADLINE_S, key_of
from devkit.far_servers import RedisServer

from ..conftest import eventually
from ..disk.disk_stage import put
from .far_stage import Host

Hosts = Callable[..., Host]


quick_to_answer = pytest.mark.parametrize("url", ["file", "valkey"], indirect=True)
"""The S3 server of the tests needs more than the 0.25 s of a question for 64 names, on a busy machine."""


def tiers(one: Host, keys: list[bytes]) -> bytes:
    return one.store.tiers(keys, deadline_s=DEADLINE_S)


@quick_to_answer
def test_far_ticket_of_absent_keys_is_shown_once_they_are_answered(host: Hosts, url: str) -> None:
    one = host(url)
    ticket = one.store.start_far_lookup([key_of(name) for name in range(200)])
    eventually(lambda: one.store.is_far_lookup_done(ticket), within_s=5)
    assert one.far().asks == {"found": 0, "absent": 200}
    other = one.store.start_far_lookup([key_of("other")])
    assert other not in (0, ticket)
    eventually(lambda: one.store.is_far_lookup_done(other), within_s=5)
    assert one.store.start_far_lookup([key_of("other")]) == 0, "within the second"


@quick_to_answer
def test_far_ticket_is_shown_behind_what_was_found(host: Hosts, url: str) -> None:
    first, second = host(url), host(url)
    for name in range(50):
        put(first.store, name)
    eventually(lambda: first.written(50))
    for name in range(50):
        ticket = second.store.start_far_lookup([key_of(name)])
        eventually(lambda ticket=ticket: second.store.is_far_lookup_done(ticket), within_s=5)  # type: ignore[misc]
        assert tiers(second, [key_of(name)]) == bytes([Tier.DISK])


def test_far_ticket_of_a_stopped_store_is_shown_once_it_is_given_up(
    host: Hosts, share: Path, redis: RedisServer
) -> None:
    one = host(f"file://{share}", redis.url)
    eventually(lambda: one.store.is_far_up)
    redis.freeze()
    began_s = time.monotonic()
    ticket = one.store.start_far_lookup([key_of("a")])
    eventually(lambda: one.store.is_far_lookup_done(ticket), within_s=5)
    assert time.monotonic() - began_s > 0.2, "one of two stores has its 0.25 s"
    ticket = one.store.start_far_lookup([key_of("b")])
    eventually(lambda: one.store.is_far_lookup_done(ticket), within_s=5)
    assert one.far(1).asks == {"error": 1}, "it is not asked for a while"


@quick_to_answer
def test_recalled_absent_entry_is_waited_for_no_longer_than_its_answer(
    host: Hosts, url: str, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    one = host(url)
    monkeypatch.setattr(payload, "FAR_WAIT_S", 30.0)
    with within(10):
        found = recall_and_wait(one.store, [key_of("none")], within_s=60, deadline_s=DEADLINE_S)
    assert found == bytes([Tier.ABSENT])


@quick_to_answer
def test_recall_request_with_a_ticket_that_is_none_is_refused(host: Hosts, url: str) -> None:
    one = host(url)
    connection = one.store._link.require_connection()
    connection.send_one_way(messages.RecallRequest(key_of("a"), -1))
    ticket = one.store.start_far_lookup([key_of("b")])
    eventually(lambda: one.store.is_far_lookup_done(ticket), within_s=5)
    assert one.far().asks["absent"] == 1


@quick_to_answer
def test_answered_store_that_has_ended_says_no(host: Hosts, url: str) -> None:
    one = host(url)
    ticket = one.store.start_far_lookup([key_of("a")])
    eventually(lambda: one.store.is_far_lookup_done(ticket), within_s=5)
    one.end()
    assert not one.store.is_far_lookup_done(ticket)


def test_mapped_entry_table_ticket_gives_way_to_one_of_its_word() -> None:
    writer = EntryTableWriter(TableShape.for_capacity(1 << 20, has_far=True), has_disk=True)
    table = MappedEntryTable(writer.fd)
    tickets = [1, TICKETS - 1, 7 + (1 << 63)]
    assert not any(table.has_ticket(ticket) for ticket in tickets)
    for ticket in tickets:
        writer.show_ticket(ticket)
    assert all(table.has_ticket(ticket) for ticket in tickets)
    writer.show_ticket(1 + TICKETS)
    assert [table.has_ticket(ticket) for ticket in tickets] == [False, True, True]
    assert (table.has_disk, table.is_far_up) == (True, False)
    assert table.contains([key_of(name) for name in range(20)]) == bytes(20)
    writer.close()


def test_far_lookups_tell_each_caller_once_its_last_key_is_over() -> None:
    questions, told = FarLookupQueue(), list[str]()
    questions.notify_when_done(lambda: told.append("none"))
    assert told == ["none"], "nothing is waited for"
    for name in range(3):
        questions.add(key_of(name))
    questions.notify_when_done(lambda: told.append("first"))
    assert questions.take_batch(2) == [key_of(0), key_of(1)]
    questions.add(key_of(3))
    questions.notify_when_done(lambda: told.append("second"))
    questions.finish_batch()
    assert told == ["none"], "the third key is in no question yet"
    assert questions.take_batch(1) == [key_of(2)]
    questions.finish_batch()
    assert told == ["none", "first"]
    questions.take_batch(9)
    questions.clear()
    assert told == ["none", "first", "second"], "given up while the question is under way"
    questions.finish_batch()
    questions.add(key_of(4))
    questions.notify_when_done(lambda: told.append("third"))
    assert told[-1] == "second"


def test_far_lookups_keys_beyond_the_bound_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_lookup_queue, "MAX_PENDING_KEYS", 2)
    questions, told = FarLookupQueue(), list[int]()
    assert [questions.add(key_of(name)) for name in range(3)] == [True, True, False]
    questions.notify_when_done(lambda: told.append(1))
    questions.take_batch(9)
    questions.finish_batch()
    assert told == [1]
