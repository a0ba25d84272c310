"""An engine on a CPU computes on as many cores with cornplug as without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.utils.ompmultiprocessing import OMPProcessManager

from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.compat import KV_CONNECTOR


def reserved(connector: str | None) -> int:
    plugin.register()
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    parallel = SimpleNamespace(
        local_world_size=1, data_parallel_rank_local=0, _api_process_count=1, assigned_physical_gpu_ids=None
    )
    config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    found = OMPProcessManager(config).reserve_cpu_num
    assert config.kv_transfer_config is transfer
    return found


def test_cornplug_reserves_no_core() -> None:
    assert reserved(KV_CONNECTOR) == reserved(None)


def test_other_connectors_keep_their_reserved_core() -> None:
    assert reserved("NixlConnector") == reserved(None) + 1
