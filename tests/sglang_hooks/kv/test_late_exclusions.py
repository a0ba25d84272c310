"""What only the loaded model shows: nothing of ours, or of HiCache's, is left running for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context

from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.kv import late_exclusions
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage

from ..kv_rig import device_pool, latent_pool, windowed_pool


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

    def __init__(self, pool: Any, *, given: bool) -> None:
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))
        # As the operator wrote it: what we declare is not seen there.
        self.server_args = SimpleNamespace(enable_hierarchical_cache=given)


class Cache:
    """SGLang's cache on one of two ranks; `others` is what the other one votes."""

    def __init__(self, *, here: bool, others: bool) -> None:
        storage = CornplugStorage.__new__(CornplugStorage)
        storage._off = "" if here else "layout"
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
        (windowed_pool(16), ""),
        (windowed_pool(16, swa_head_num=2), "kind SWAKVPool"),
        (device_pool(16, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (Another.__new__(Another), "kind Another"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_late_exclusions_unsupported_pool_turns_hicache_off(
    pool: Any, why: str, given: bool, overridden: dict[str, Any]
) -> None:
    scheduler = Scheduler(pool, given=given)
    with mock.patch.object(compat.logger, "warning") as warning:
        late_exclusions._pools_made(None, scheduler)
    assert scheduler.enable_hicache_storage is not bool(why)
    assert scheduler.enable_hierarchical_cache is (given or not why)
    assert why in str(warning.call_args)
    if why:
        assert overridden.pop("hicache_storage_backend") is None
        assert overridden.pop("hicache_storage_backend_extra_config") is None
    assert overridden == ({"enable_hierarchical_cache": False} if why and not given else {})


@pytest.mark.parametrize(("here", "others"), [(True, True), (True, False), (False, True), (False, False)])
def test_late_exclusions_one_rank_off_detaches_all(
    here: bool, others: bool, overridden: dict[str, Any]
) -> None:
    scheduler: Any = Scheduler(device_pool(16), given=False)
    late_exclusions._schedulers.clear()
    late_exclusions._pools_made(None, scheduler)
    cache = Cache(here=here, others=others)
    late_exclusions._host_pools_made(None, cache)
    assert cache.detached is not (here and others)
    assert scheduler.enable_hicache_storage is (here and others)
    assert overridden.get("hicache_storage_backend", "ours") == ("ours" if here and others else None)


def test_late_exclusions_other_storage_stays_attached(overridden: dict[str, Any]) -> None:
    cache = Cache(here=False, others=False)
    cache.cache_controller.storage_backend = SimpleNamespace()
    late_exclusions._host_pools_made(None, cache)
    late_exclusions._host_pools_made(None, SimpleNamespace(cache_controller=None))
    assert not cache.detached
    assert overridden == {}
