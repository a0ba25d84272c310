"""What only the loaded model shows: nothing of ours, or of HiCache's, is left running for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode

from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.kv import late_exclusions
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv_pages import draft_pages

from ..hooked import hook_of
from ..kv_rig import device_pool, latent_pool, windowed_pool

init_model_worker = hook_of(late_exclusions, "Scheduler.init_model_worker")
init_hicache = hook_of(late_exclusions, "UnifiedRadixCache.init_hicache")
register_hicache_draft = hook_of(late_exclusions, "maybe_register_hicache_draft")


@pytest.fixture(autouse=True)
def overridden(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was written over SGLang's published settings."""
    found: dict[str, Any] = {}
    context = SimpleNamespace(override=lambda source, **fields: found.update(fields))
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    monkeypatch.setattr(activation, "is_on", lambda: True)
    return found


class Scheduler:
    enable_hicache_storage = enable_hierarchical_cache = True

    def __init__(self, pool: Any, *, given: bool, model: torch.nn.Module | None = None) -> None:
        runner = SimpleNamespace(token_to_kv_pool=pool, model=model)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.draft_worker: Any = None
        # As the operator wrote it: what we declare is not seen there.
        self.server_args = SimpleNamespace(enable_hierarchical_cache=given)


class Storage(CornplugStorage):
    """A storage that is open or not, and that lacks the pool of a draft model or not."""

    is_open = lacks_draft = False

    def __init__(self, *, is_open: bool, lacks_draft: bool) -> None:
        self.is_open, self.lacks_draft = is_open, lacks_draft


class Cache:
    """SGLang's cache on one of two ranks; `others` is what the other one votes."""

    def __init__(self, *, here: bool, others: bool, lacks_draft: bool = False) -> None:
        storage = Storage(is_open=here, lacks_draft=lacks_draft)
        self.cache_controller = SimpleNamespace(storage_backend=storage)
        self.others, self.detached = others, False

    pp_size = 1

    def _all_reduce_attn_groups(self, tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.fill_(min(int(tensor.item()), int(self.others)))

    def detach_storage_backend(self) -> None:
        self.detached = True


class Another(type(device_pool(16))):  # type: ignore[misc]
    """A pool with other contents than its parent's."""


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (device_pool(16), ""),
        (latent_pool(16), ""),
        (device_pool(16, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        (device_pool(16, dtype=torch.float8_e4m3fn), "are unknown"),
        (windowed_pool(16), ""),
        (windowed_pool(16, swa_head_num=2), "KV pool SWAKVPool"),
        (Another.__new__(Another), "KV pool Another"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_late_exclusions_unsupported_pool_turns_hicache_off(
    pool: Any, why: str, given: bool, overridden: dict[str, Any]
) -> None:
    scheduler = Scheduler(pool, given=given)
    with mock.patch.object(compat.logger, "warning") as warning:
        init_model_worker(None, scheduler)
    assert scheduler.enable_hicache_storage is not bool(why)
    assert scheduler.enable_hierarchical_cache is (given or not why)
    assert why in str(warning.call_args)
    if why:
        assert overridden.pop("hicache_storage_backend") is None
        assert overridden.pop("hicache_storage_backend_extra_config") is None
    assert overridden == ({"enable_hierarchical_cache": False} if why and not given else {})


def _attention(**scales: Any) -> torch.nn.Module:
    """A model of two attention layers, the second with these scales."""
    layers = [RadixAttention(4, 8, 1.0, 4, layer_id=i) for i in range(2)]
    for name, scale in scales.items():
        setattr(layers[1], name, scale)
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        ({}, ""),
        ({"k_scale": torch.tensor(1.0), "k_scale_float": 1.0, "v_scale_float": 1.0}, ""),
        ({"k_scale": torch.tensor(0.5)}, "layer 1 has an fp8 KV cache with k_scale"),
        ({"v_scale": torch.tensor([1.0, 2.0])}, "v_scale"),
        ({"v_scale_float": 0.25}, "v_scale_float"),
        ({"k_scale_float": float("nan")}, "k_scale_float"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_late_exclusions_fp8_kv_is_shared_with_scales_of_one(
    dtype: torch.dtype, scales: dict[str, Any], why: str
) -> None:
    scheduler: Any = Scheduler(device_pool(16, dtype=dtype), given=False, model=_attention(**scales))
    with mock.patch.object(compat.logger, "warning") as warning:
        init_model_worker(None, scheduler)
    assert scheduler.enable_hicache_storage is not bool(why)
    assert why in str(warning.call_args)


def test_late_exclusions_fp8_kv_with_a_quantisers_scales_is_refused() -> None:
    """As SGLang's CPU backend with AMX keeps it, and FP4 everywhere."""
    pool = device_pool(16, dtype=torch.float8_e4m3fn)
    pool.quant_method = SimpleNamespace()
    assert "fp8 KV with scales of" in late_exclusions.pool_exclusion(pool, _attention())


@pytest.mark.parametrize(("here", "others"), [(True, True), (True, False), (False, True), (False, False)])
def test_late_exclusions_one_rank_off_detaches_all(
    here: bool, others: bool, overridden: dict[str, Any]
) -> None:
    scheduler: Any = Scheduler(device_pool(16), given=False)
    init_model_worker(None, scheduler)
    cache = Cache(here=here, others=others)
    init_hicache(None, cache)
    assert cache.detached is not (here and others)
    assert scheduler.enable_hicache_storage is (here and others)
    assert overridden.get("hicache_storage_backend", "ours") == ("ours" if here and others else None)


@pytest.mark.parametrize(("lacks", "others"), [(False, True), (True, True), (False, False)])
def test_late_exclusions_rank_without_the_drafts_pool_detaches_all(
    lacks: bool, others: bool, overridden: dict[str, Any]
) -> None:
    cache = Cache(here=True, others=others, lacks_draft=lacks)
    init_hicache(None, Cache(here=True, others=True))
    register_hicache_draft(None, tree_cache=cache, draft_plan=None)
    assert cache.detached is (lacks or not others)


@pytest.mark.parametrize(
    ("pools", "mode", "why"),
    [
        ((), "none", ""),
        ((device_pool(16, heads=2),), "sidecar", ""),
        ((device_pool(16, dtype=torch.float8_e4m3fn),), "sidecar", "draft model: fp8 KV"),
        ((Another.__new__(Another),), "sidecar", "draft model: KV pool Another"),
        ((device_pool(16), device_pool(16)), "sidecar", "2 draft models"),
        ((device_pool(16),), "packed", "not in a separate pool: SGLang keeps it as packed"),
    ],
)
def test_late_exclusions_draft_is_announced_and_its_pool_judged(
    pools: tuple[Any, ...], mode: str, why: str, overridden: dict[str, Any]
) -> None:
    scheduler: Any = Scheduler(device_pool(16), given=False)
    runners = [
        SimpleNamespace(token_to_kv_pool=pool, model_config=f"draft {i}") for i, pool in enumerate(pools)
    ]
    plan = SimpleNamespace(mode=HiCacheDraftMode(mode))
    scheduler.draft_worker = SimpleNamespace(
        _draft_model_runners=lambda: tuple(runners), hicache_draft_plan=plan
    )
    with mock.patch.object(compat.logger, "warning") as warning:
        init_model_worker(None, scheduler)
    assert draft_pages.get_draft_model() == ("draft 0" if pools else None)
    assert scheduler.enable_hicache_storage is not bool(why)
    assert why in str(warning.call_args)
    draft_pages.set_draft_model(None)


def test_late_exclusions_other_storage_stays_attached(overridden: dict[str, Any]) -> None:
    cache = Cache(here=False, others=False)
    cache.cache_controller.storage_backend = SimpleNamespace()
    init_hicache(None, cache)
    init_hicache(None, SimpleNamespace(cache_controller=None))
    assert not cache.detached
    assert overridden == {}
