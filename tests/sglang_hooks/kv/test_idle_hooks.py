"""Who waits for an idle server's copy under way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

from cornplug.sglang_hooks.kv import storage_hooks

from ..hooked import hook_of
from .test_idle_backups import Server

process_input_requests = hook_of(storage_hooks, "Scheduler.process_input_requests")
flush_cache = hook_of(storage_hooks, "Scheduler.flush_cache")


def test_idle_hooks_flush_waits_for_the_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(storage_hooks, "_idle_backups_of", lambda cache: server.idle)
    under_way = {7: "a copy"}
    rounds = iter([lambda: None, lambda: None, under_way.clear])
    server.scheduler.waiting_queue = []
    server.scheduler.running_batch = SimpleNamespace(is_empty=lambda: True)
    server.cache.ongoing_write_through, server.cache.ongoing_backup = {}, under_way
    server.cache.check_hicache_events = lambda: next(rounds)()
    process_input_requests(server.scheduler, [ReleaseMemoryOccupationReqInput()])
    assert not under_way

    under_way[8] = "another one, and a request"
    server.scheduler.waiting_queue = ["a request"]
    flush_cache(server.scheduler)
    assert under_way


def test_idle_hooks_requests_that_want_an_idle_server_are_sglangs() -> None:
    """They are told by name: one that SGLang renames would no longer wait."""
    assert all(hasattr(io_struct, name) for name in storage_hooks._IDLE_ONLY_REQUESTS)
