"""SGLang's own pools on a CPU, and our reader and writer over a store in memory."""

from __future__ import annotations

import inspect
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_hicache_cpu
import torch
from sglang.srt.arg_groups import overrides
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.shared_flags import load_settings
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv import hicache_config, hicache_storage
from cornplug.sglang_hooks.kv_pages import page_hash_index
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.layout import (
    HostPages,
    ModelKV,
    RankPosition,
    host_pages,
    layers_of_stages,
    page_geometry,
    quantised_format,
    rank_heads,
)
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.sglang_hooks.kv_pages.writer import PageWriter, writer_part
from cornplug.store.base import Store
from cornplug.testing import FaultyStore

from .hooked import hook_of

storage_hash = hook_of(page_hash_index, "get_storage_hash_str")
attach_storage_backend = hook_of(page_hash_index, "HybridCacheController.attach_storage_backend")

# The copies between device and host that SGLang has for GPUs only.
sglang_hicache_cpu.register()
HookRegistry.apply_hooks()
get_parallel().override_permanently(dcp_enabled=False)

SECRET = bytes(range(32))
HEADS, LAYERS, DIM = 4, 3, 8
LATENT, ROTARY = 12, 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PLAIN = CacheNamespace(None, None)
HOST_TOKENS = 1024


def device_pool(
    page_size: int,
    *,
    heads: int = HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
    layers: range = range(LAYERS),
) -> Any:
    return MHATokenToKVPool(
        size=256,
        page_size=page_size,
        dtype=dtype,
        head_num=heads,
        head_dim=dim,
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
        start_layer=layers.start,
        end_layer=layers.stop - 1,
    )


def latent_pool(page_size: int, *, layers: range = range(LAYERS)) -> Any:
    return MLATokenToKVPool(
        size=256,
        page_size=page_size,
        dtype=torch.float32,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
        start_layer=layers.start,
        end_layer=layers.stop - 1,
    )


WINDOW = 100
WINDOWED = (0, 2)
"""Layers with a window; the others see all."""


def windowed_pool(page_size: int, *, heads: int = HEADS, **more: Any) -> Any:
    """Sliding windows beside full attention."""
    return SWAKVPool(
        size=256,
        size_swa=256,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=DIM,
        swa_attention_layer_ids=list(WINDOWED),
        full_attention_layer_ids=[layer for layer in range(LAYERS) if layer not in WINDOWED],
        device="cpu",
        **more,
    )


def host_pool(device: Any, layout: str) -> Any:
    kind = MLATokenToKVPoolHost if isinstance(device, MLATokenToKVPool) else MHATokenToKVPoolHost
    more: dict[str, Any] = {"target_layer_num": device.layer_num} if kind is MLATokenToKVPoolHost else {}
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        HOST_TOKENS / 256,
        0,
        device.page_size,
        layout,
        device_capacity_tokens=256,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        **more,
    )


class Controller:
    """What `verify_layout` needs of SGLang's cache controller, with SGLang's own index moves."""

    move_indices = HiCacheController.move_indices
    write_policy = "write_through"

    def __init__(self, device: Any, host: Any) -> None:
        self.mem_pool_device, self.mem_pool_host = device, host
        self.io_backend = "kernel" if host.layout in ("page_first", "page_head") else "direct"
        self.device = torch.device("cpu")
        self.storage_stop_event = threading.Event()


class Another(FaultyStore):
    """A connection of its own to the same store: it meets the same faults, and ends alone."""

    def close(self) -> None:
        self.closed = True


class RigRuntime(EngineRuntime):
    def __init__(self, store: Store, another: Store | None = None) -> None:
        self.config = load_settings({"engine.app": "test", "engine.save": "always"})
        self.app, self.secret, self.store = "test", SECRET, store
        self.another = another

    def open_connection(self) -> Store:
        return self.another or Another(self.store)


def as_scheduler(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[Tally, SimpleNamespace]:
    """Make this a scheduler process of a server with cornplug, up to the attaching of its storage.

    Returns its metrics and SGLang's config of its model.
    """
    runtime, tally = RigRuntime(store), Tally()
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(activation, "runtime", lambda: runtime)
    monkeypatch.setattr(activation, "tally", lambda: tally)
    monkeypatch.setattr(hicache_storage, "_identify", lambda: (b"model", {"config": "x"}))
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: None)
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: HEADS,
        num_hidden_layers=LAYERS,
        sliding_window_size=None,
        hf_config=SimpleNamespace(to_dict=dict),
    )
    monkeypatch.setattr(overrides, "model_config_of", lambda args: model)
    return tally, model


def storage_config(**more: Any) -> HiCacheStorageConfig:
    """SGLang's for one rank with the storage "cornplug"."""
    plain: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        "extra_config": dict(hicache_config.BACKEND),
    }
    return HiCacheStorageConfig(**plain | more)


def attached(device: Any, hosts: Mapping[PoolName, Any], **more: Any) -> hicache_storage.CornplugStorage:
    """A storage as HybridCacheController.attach_storage_backend makes it for these host pools."""
    anchor = hosts[PoolName.KV]

    def making(controller: Any) -> Any:
        backend = StorageBackendFactory.create_backend("dynamic", storage_config(**more), anchor)
        backend.register_mem_pool_host(anchor)
        for name, host in hosts.items():
            backend.register_mem_host_pool_v2(host, name)
        backend.on_host_pools_registered()
        return backend

    found = attach_storage_backend(making, Controller(device, anchor))
    assert isinstance(found, hicache_storage.CornplugStorage)
    return found


def hashes_of(
    tokens: Sequence[int], page_size: int, space: CacheNamespace = PLAIN, *, in_pairs: bool = False
) -> list[str]:
    """SGLang's own page hashes, of pairs of tokens beside an EAGLE draft."""
    key = RadixKey(
        array("q", tokens), extra_key=space.extra_key, cache_salt=space.cache_salt, is_bigram=in_pairs
    )
    # Without our hook, which another test may have left there.
    hashed = inspect.unwrap(get_storage_hash_str)
    found = hashed(key.page_aligned(page_size), None, page_size=page_size)
    assert isinstance(found, list)
    return found


def named(tokens: Sequence[int], page_size: int, space: CacheNamespace = PLAIN) -> list[str]:
    """SGLang's page hashes, which the hook on its function records in the process's index."""
    key = RadixKey(array("q", tokens), extra_key=space.extra_key, cache_salt=space.cache_salt)
    hashes = storage_hash(
        inspect.unwrap(get_storage_hash_str), key.page_aligned(page_size), None, page_size=page_size
    )
    assert isinstance(hashes, list)
    return hashes


def page_of(geometry: PageGeometry, seed: int) -> torch.Tensor:
    """KV of a page: (heads, layers, planes, tokens, dim)."""
    values = torch.randn(geometry.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, geometry.dtype))


def sequence(geometry: PageGeometry, tokens: int, seed: int = 7) -> torch.Tensor:
    """KV of a whole sequence: (heads, layers, planes, tokens, dim)."""
    shape = (*geometry.shape[:3], tokens, geometry.dim)
    generator = torch.Generator().manual_seed(seed)
    if geometry.quantised:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator).to(getattr(torch, geometry.dtype))


@dataclass
class Engine:
    """One rank of an engine: a host pool, and what moves its pages."""

    store: Store
    page_size: int = 64
    page_tokens: int = 64
    layout: str = "layer_first"
    tp: tuple[int, int] = (1, 0)
    pp: tuple[int, int] = (1, 0)
    latent: bool = False
    group: bytes = b"one engine's ranks"
    identity: bytes = b"model"
    only_seen: bool = False
    threads: int = 1
    """That copy pages."""
    dim: int = DIM
    dtype: torch.dtype = torch.bfloat16
    stopping: bool = False
    """SGLang waits for the end of its storage threads."""
    asks: Any = None
    """Connection of the lookups, instead of another one to the store."""
    faulty: Any = None
    """Connection of the copies, instead of a `FaultyStore` over `store`."""

    def __post_init__(self) -> None:
        size, rank = self.tp
        per_rank = max(1, HEADS // size)
        stages, stage = self.pp
        place = RankPosition(rank, size, stage, layers_of_stages(LAYERS, stages))
        self.layers = place.layers
        device = (
            latent_pool(self.page_size, layers=self.layers)
            if self.latent
            else device_pool(
                self.page_size, heads=per_rank, dim=self.dim, dtype=self.dtype, layers=self.layers
            )
        )
        self.host = host_pool(device, self.layout)
        self.pages: HostPages = host_pages(self.host)
        self.geometry = page_geometry(
            self.pages,
            ModelKV(HEADS, LAYERS, {}),
            page_tokens=self.page_tokens,
            quantised=quantised_format(self.dtype),
            attention="torch_native torch_native",
            position=place,
        )
        self.heads, writes = rank_heads(self.pages, self.geometry, size, rank)
        self.faulty = self.faulty or FaultyStore(self.store)
        self.tally = Tally()
        self.index = PageHashIndex(self.page_size, self.page_tokens)
        self.run = RigRuntime(self.faulty, self.asks)
        self.roots = NamespaceRoots(SECRET, self.geometry, lambda: (self.identity, {"config": "x"}))
        held = RankSlice(heads=self.heads, layers=self.layers, writes=writes)
        mine = RankPages(self.geometry, held, self.faulty)
        among = (1, 0) if self.latent else (size, rank)
        part = writer_part(self.geometry, *among, self.group, stages=stages, stage=stage)
        pace = LoadPace("always", self.geometry.page_bytes / self.geometry.page_tokens)
        context = PoolContext(
            self.run, self.index, self.tally, pace, lambda: self.stopping, only_seen=self.only_seen
        )
        pool = RankPool(mine, self.pages, self.threads)
        self.reader = PageReader(context, self.roots, pool)
        self.writer = PageWriter(context, self.reader, pool, part)

    def knows(self, tokens: Sequence[int], space: CacheNamespace = PLAIN) -> list[str]:
        hashes = hashes_of(tokens, self.page_size, space)
        self.index.record(None, hashes, tokens, space)
        return hashes

    def part(self, kv: torch.Tensor) -> torch.Tensor:
        """This rank's heads and layers of a sequence's KV."""
        return kv[self.heads.start : self.heads.stop, self.layers.start : self.layers.stop]

    def put(self, kv: torch.Tensor, first: int, count: int) -> list[int]:
        """Place pages first, first+1, ... of a sequence's KV into the host pool; their slots."""
        slots = self.host.alloc(count * self.page_size)[:: self.page_size].tolist()
        for i, slot in enumerate(slots):
            start = (first + i) * self.page_size
            self.pages.page(slot).copy_(self.part(kv)[..., start : start + self.page_size, :])
        return [int(slot) for slot in slots]

    def save(
        self, tokens: Sequence[int], kv: torch.Tensor, *, first: int = 0, space: CacheNamespace = PLAIN
    ) -> None:
        """As SGLang backs up the pages from `first` on."""
        hashes = self.knows(tokens, space)
        self.writer.save(hashes[first:], self.put(kv, first, len(hashes) - first))

    def load(self, tokens: Sequence[int], *, space: CacheNamespace = PLAIN) -> torch.Tensor:
        """As SGLang prefetches; the KV of this rank's heads that was found."""
        hashes = self.knows(tokens, space)
        present = self.reader.count_present(hashes)
        slots = self.host.alloc(len(hashes) * self.page_size)[:: self.page_size].tolist()
        done = self.reader.load(hashes[:present], slots)
        found = [self.pages.page(slot).clone() for slot in slots[:done]]
        empty = self.pages.page(0)[..., :0, :]
        self.host.free(torch.cat([torch.arange(slot, slot + self.page_size) for slot in slots]))
        return torch.cat(found, dim=3) if found else empty

    def counts(self) -> dict[tuple[str, ...], float]:
        """metric and labels without the app and "kv_page" -> count."""
        found: dict[tuple[str, ...], float] = {}
        for name, rows in self.tally.drain().items():
            for labels, values in rows:
                found[name, *labels[2:]] = found.get((name, *labels[2:]), 0) + sum(values)
        return found
