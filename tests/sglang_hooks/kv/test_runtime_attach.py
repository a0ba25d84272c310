"""Storage detached and attached while SGLang runs: its own tree and controller, over our storage."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import ClearHiCacheReqInput, ClearHiCacheReqOutput
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import ConfigError, LayoutError
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv import hicache_config, hicache_storage, late_exclusions
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.store.base import Store

from ..hooked import hook_of
from ..kv_rig import storage_config
from .test_window_tree import PAGE, TOKENS, Server, one_rank, store  # noqa: F401

attach_storage_backend = hook_of(late_exclusions, "UnifiedRadixCache.attach_storage_backend")
init_model_worker = hook_of(late_exclusions, "Scheduler.init_model_worker")
clear_hicache_storage = hook_of(late_exclusions, "Scheduler.clear_hicache_storage_wrapped")

NAMES = json.dumps(hicache_config.BACKEND)
"""What `PUT /hicache/storage-backend` has to name."""
OTHERS = [990 - token for token in TOKENS]


class Scheduler:
    """Of a server that started with the storage."""

    enable_hicache_storage = True

    def __init__(self, server: Server) -> None:
        self.tree_cache = server.cache
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=server.device))
        self.draft_worker = None


@pytest.fixture
def server(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:  # noqa: F811
    config = load_settings({"engine.app": "test", "engine.save": "always"})
    monkeypatch.setattr(activation, "config", lambda: config)
    monkeypatch.setattr(late_exclusions, "_schedulers", weakref.WeakSet())
    one = Server()
    scheduler: Any = Scheduler(one)
    init_model_worker(None, scheduler)
    yield one
    one.cache.detach_storage_backend()


def put(server: Server, extra: str = NAMES, backend: str = "dynamic") -> tuple[bool, str]:
    """As SGLang's scheduler does for a PUT."""
    original = UnifiedRadixCache.attach_storage_backend
    return attach_storage_backend(
        original, server.cache, storage_backend=backend, storage_backend_extra_config_json=extra
    )


def test_attach_to_a_full_host_pool_shares_again(store: Store, server: Server) -> None:  # noqa: F811
    server.serve(store, TOKENS[:128])
    assert server.cache.detach_storage_backend()[0]
    full = [entry.host_pool for entry in server.cache.cache_controller.mem_pool_host.entries]
    held = [(pool, pool.alloc(pool.available_size())) for pool in full]
    assert all(slots is not None for _, slots in held)
    ok, said = put(server)
    assert ok, said
    assert server.cache.cache_controller.storage_backend.is_open
    for pool, slots in held:
        pool.free(slots)
    # A prompt goes on that the tree has: its first page was backed up for the storage before.
    longer = [*TOKENS[:64], *OTHERS[:64]]
    server.serve(store, longer, entries=store.stat(deadline_s=1).entries + 2)
    server.cache.detach_storage_backend()
    assert Server().fetch(longer).host_hit_length == len(longer)


def test_attach_of_storage_that_cannot_share_says_why(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise LayoutError("SGLang does not back up as believed", reason="layout")

    server.cache.detach_storage_backend()
    with monkeypatch.context() as patch:
        patch.setattr(hicache_storage, "verify_layout", refuse)
        ok, said = put(server)
    assert not ok
    assert "SGLang does not back up as believed" in said
    assert not server.cache.enable_storage
    assert server.cache.cache_controller.storage_backend is None
    assert put(server)[0]


def test_attach_after_an_unexpected_error_leaves_nothing_attached(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cache.detach_storage_backend()
    with monkeypatch.context() as patch:
        patch.setattr(hicache_storage, "verify_layout", lambda *args: torch.zeros(1).view(7))
        assert not put(server)[0]
    assert server.cache.cache_controller.storage_backend is None
    assert put(server)[0]


@pytest.mark.parametrize("here", [True, False])
def test_attach_is_a_vote_of_all_ranks(server: Server, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    server.cache.detach_storage_backend()
    votes = []

    def agreed(cache: Any, mine: bool) -> bool:
        votes.append(mine)
        return False

    monkeypatch.setattr(late_exclusions, "all_ranks_agree", agreed)
    if not here:
        monkeypatch.setattr(hicache_storage, "host_pages", lambda pool: 1 / 0)
    ok, said = put(server)
    assert (ok, votes) == (False, [here])
    assert ("another rank" in said) is here
    assert server.cache.cache_controller.storage_backend is None


def test_attach_that_the_start_excluded_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.cache.detach_storage_backend()
    with monkeypatch.context() as patch:
        patch.setattr(late_exclusions, "pool_exclusion", lambda pool, model=None: "a pool without pages")
        assert put(server) == (False, "cornplug: KV of this engine is not shared: a pool without pages")
    with monkeypatch.context() as patch:
        patch.setattr(server.cache, "pp_size", 2)
        assert "pipeline stages" in put(server)[1]
    other = Server()  # no scheduler of this process has its cache
    other.cache.detach_storage_backend()
    assert "started without KV sharing. Restart it" in put(other)[1]
    assert not other.cache.enable_storage
    monkeypatch.setattr(activation, "selected_parts", lambda: frozenset({"weights"}))
    with pytest.raises(ConfigError, match="without KV sharing"):
        CornplugStorage(storage_config())


def test_attach_of_another_storage_is_sglangs(server: Server) -> None:
    ok, said = put(server, extra="{}", backend="file")
    assert not ok
    assert "Detach first" in said
    assert "policies updated" in put(server)[1]  # Attached already: SGLang's own answer.


def test_clear_of_the_shared_store_is_refused(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def original(self: Any, recv_req: Any) -> Any:
        return ClearHiCacheReqOutput(success=True)

    scheduler = Scheduler(server)
    with caplog.at_level("WARNING", logger="sglang.cornplug"):
        assert not clear_hicache_storage(original, scheduler, ClearHiCacheReqInput()).success
    assert "cornplug store purge" in caplog.text
    server.cache.detach_storage_backend()
    assert clear_hicache_storage(original, scheduler, ClearHiCacheReqInput()).success
