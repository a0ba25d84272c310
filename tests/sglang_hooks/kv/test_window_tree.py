"""SGLang's own tree, controller and pools of a model with windows, over our storage: no model, no server."""

from __future__ import annotations

import functools
import json
import pkgutil
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

from cornplug.sglang_hooks.compat import Hook
from cornplug.sglang_hooks.kv import hicache_config
from cornplug.sglang_hooks.kv_pages import page_hash_index
from cornplug.store.base import Store
from cornplug.store.memory import MemoryStore
from devkit.processes import wait_until

from ..kv_rig import WINDOW, as_scheduler, windowed_pool

PAGE = 64
TOKENS = [1 + (5 * i) % 983 for i in range(256)]
EXTRA = {
    **hicache_config.BACKEND,
    "prefetch_threshold": PAGE,
    "hicache_storage_pass_prefix_keys": True,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """That of a process with our hooks around SGLang's cache."""
    published = get_context().override_server_args(
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_size=0,
        hicache_mem_layout="page_first_direct",
        hicache_io_backend="direct",
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(EXTRA),
        hicache_storage_prefetch_policy="wait_complete",
    )
    published.install()
    arguments = get_server_args()
    store = MemoryStore(capacity_bytes=16 << 20).connect()
    _, model = as_scheduler(monkeypatch, store)
    model.sliding_window_size = WINDOW
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: arguments)
    for hook in page_hash_index.HOOKS:
        around(monkeypatch, hook)
    with get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0):
        yield store
    page_hash_index.close_index()
    published.restore()


def around(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    assert hook.kind == "around"
    place, _, name = hook.target.rpartition(".")
    original = getattr(pkgutil.resolve_name(place), name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook.function(original, *args, **kwargs)

    monkeypatch.setattr(hook.target, hooked)


class Server:
    """The caches of one server."""

    def __init__(self) -> None:
        self.device = windowed_pool(PAGE)
        self.allocator = SWATokenToKVPoolAllocator(
            256, 256, PAGE, torch.bfloat16, "cpu", self.device, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 512, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=torch.distributed.group.WORLD,
            sliding_window_size=WINDOW - 1,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
            tree_core_backend="python",
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(get_server_args(), params)

    def serve(
        self, store: Store, tokens: list[int], *, windows_from: int = 0, entries: int | None = None
    ) -> torch.Tensor:
        """Have the KV of a finished prompt, random values, in the tree and in the store; its device slots.

        The windows of its first tokens were given up while it ran. `entries`: of the store then; by default
        those of this prompt.
        """
        wanted = len(tokens) // PAGE + 2 if entries is None else entries
        none, whole = torch.tensor([0]), torch.tensor([len(tokens)])
        slots = self.allocator.alloc_extend(none, none, whole, whole, torch.tensor([-1]), len(tokens))
        assert slots is not None
        for pool in (self.device.full_kv_pool, self.device.swa_kv_pool):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.normal_()
        inserted = InsertParams(key=RadixKey(array("q", tokens)), value=slots)
        inserted.set_evicted_seqlen(ComponentType.SWA, windows_from)
        self.cache.insert(inserted)

        def saved() -> bool:
            self.cache.check_hicache_events()
            # The window is written first.
            return store.stat(deadline_s=1).entries >= wanted and not self.cache.ongoing_backup

        wait_until(saved, deadline_s=60, what="the pages of both pools")
        return slots

    def fetch(self, tokens: list[int]) -> Any:
        """What SGLang finds in its host pools for a new prompt, after its prefetch."""
        request = CacheRequestHandle("r", 0)
        root = self.matched(tokens).last_host_node
        none = array("q")
        self.cache.prefetch_from_storage(request, root, array("q", tokens), matched_prefix_tokens=none)

        def fetched() -> bool:
            self.cache.check_hicache_events()
            return bool(self.cache.check_prefetch_progress(request))

        wait_until(fetched, deadline_s=60, what="the pages of a prompt")
        return self.matched(tokens)

    def matched(self, tokens: list[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def values(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """KV of a sequence on the device: all of full attention, and of windows those of the last window."""
        last = self.device.translate_loc_from_full_to_swa(slots)[-WINDOW + 1 :]
        of = ((self.device.full_kv_pool, slots), (self.device.swa_kv_pool, last))
        return [buffer[at].clone() for pool, at in of for buffer in (*pool.k_buffer, *pool.v_buffer)]


@pytest.mark.parametrize("windows_from", [0, 128])
def test_window_tree_prompt_of_one_server_is_loaded_by_another(store: Store, windows_from: int) -> None:
    first = Server()
    saved = first.values(first.serve(store, TOKENS, windows_from=windows_from))
    first.cache.detach_storage_backend()

    second = Server()
    found = second.fetch(TOKENS)
    assert found.host_hit_length == len(TOKENS)
    assert found.swa_host_hit_length >= WINDOW - 1
    assert second.cache.load_back(found.best_match_node)
    second.cache.ready_to_load_host_cache()
    loaded = second.matched(TOKENS)
    assert (loaded.device_prefix_len, loaded.host_hit_length) == (len(TOKENS), 0)
    slots = second.cache.tree_core.collect_full_device_indices(
        loaded.best_match_node, second.matched([]).last_device_node
    )
    for mine, theirs in zip(second.values(slots), saved, strict=True):
        assert torch.equal(mine, theirs)


def test_window_tree_prefix_whose_window_was_given_up_is_not_fetched(store: Store) -> None:
    first = Server()
    first.serve(store, TOKENS, windows_from=128)
    first.cache.detach_storage_backend()
    second = Server()
    # Its two pages of full attention are stored, and no window before their end.
    found = second.fetch([*TOKENS[:128], *(990 for _ in range(128))])
    assert (found.host_hit_length, found.device_prefix_len) == (0, 0)
