"""KV connectors of an engine if cornplug is one of several: vLLM's MultiConnector and its settings.

MultiConnector loads from the first connector that has a prefix of the request, and saves to all. The other
connectors come before cornplug: a decode server loads its prefill server's KV, and native offloading its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cornplug.vllm_connector.compat import KV_CONNECTOR

_MULTI: Final = "MultiConnector"
_OF_THE_WHOLE: Final = ("engine_id", "kv_buffer_device", "kv_port")
"""Fields that vLLM or a connector reads from the outer config. MultiConnector gives each child its engine's
id."""


def connectors(kv: Any) -> list[dict[str, Any]]:
    """Return the settings of a MultiConnector's connectors, as in its configuration. Empty for other
    connectors.
    """
    if kv is None or kv.kv_connector != _MULTI:
        return []
    return list(kv.kv_connector_extra_config.get("connectors") or ())


def is_ours(kv: Any) -> bool:
    """Return whether cornplug is the only KV connector."""
    return kv is not None and kv.kv_connector == KV_CONNECTOR


def our_settings(kv: Any) -> dict[str, Any] | None:
    """Return cornplug's settings in a configuration, which may be modified, or None if cornplug is not a KV
    connector in it.
    """
    if is_ours(kv):
        return kv.kv_connector_extra_config
    for child in connectors(kv):
        if child.get("kv_connector") == KV_CONNECTOR:
            return child.setdefault("kv_connector_extra_config", {})
    return None


def has_ours(kv: Any) -> bool:
    """Return whether cornplug is the KV connector, or one of several."""
    return our_settings(kv) is not None


def beside(other: Any, ours: Any) -> Any:
    """Return the KVTransferConfig of `other`, which may contain several connectors, with `ours` appended."""
    from vllm.config import KVTransferConfig

    if other.kv_connector is None:
        return ours
    children = connectors(other) if other.kv_connector == _MULTI else [_as_child(other)]
    return KVTransferConfig(
        kv_connector=_MULTI,
        # The outer connector saves and loads, whatever role a prefill or decode server's own connector has.
        kv_role="kv_both",
        kv_load_failure_policy=ours.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": [*children, _as_child(ours)]},
        **{name: getattr(other, name) for name in _OF_THE_WHOLE},
    )


def with_offloading(kv: Any, size_gib: float, backend: str) -> Any:
    """Return the KVTransferConfig with the connector of `--kv-offloading-size` before its others."""
    from vllm import envs
    from vllm.config import KVTransferConfig

    if backend == "native":
        simple = envs.VLLM_USE_SIMPLE_KV_OFFLOAD
        name = "SimpleCPUOffloadConnector" if simple else "OffloadingConnector"
        extra = {"cpu_bytes_to_use": size_gib * (1 << 30)}
        child: Mapping[str, Any] = {"kv_connector": name, "kv_connector_extra_config": extra}
    else:
        child = {"kv_connector": "LMCacheMPConnector"}
    first = KVTransferConfig(**child, kv_role="kv_both", engine_id=kv.engine_id)
    if is_ours(kv):
        return beside(first, kv)
    kv.kv_connector_extra_config["connectors"] = [_as_child(first), *connectors(kv)]
    return kv


def _as_child(kv: Any) -> dict[str, Any]:
    """Return the settings of one of several connectors: those that differ from vLLM's defaults."""
    plain = type(kv)(kv_connector=kv.kv_connector, kv_role=kv.kv_role)
    names = [one.name for one in dataclasses.fields(kv) if one.name != "engine_id"]
    given = {name: getattr(kv, name) for name in names if getattr(kv, name) != getattr(plain, name)}
    return {"kv_connector": kv.kv_connector, "kv_role": kv.kv_role, **given}
