"""cornplug's connectors in vLLM's configuration, also alongside other KV connectors (vLLM's MultiConnector).

MultiConnector loads a request's prefix from the first connector that has any of its tokens, and saves to all
connectors. The other connectors are listed before cornplug. Thus a decode server loads KV from its prefill
server, and native offloading loads the KV that it has offloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from cornplug.config import Config
from cornplug.engine_common.shared_flags import load_settings
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR

_MULTI: Final = "MultiConnector"
_OUTER_FIELDS: Final = ("engine_id", "kv_buffer_device", "kv_port")
"""Fields of KVTransferConfig that vLLM or a connector reads from the outer config. In addition,
MultiConnector copies the engine's id to each child."""


def child_connectors(kv: Any) -> list[dict[str, Any]]:
    """Return the settings of each connector in a MultiConnector's configuration. Return an empty list if `kv`
    is None or configures a different connector."""
    if kv is None or kv.kv_connector != _MULTI:
        return []
    return list(kv.kv_connector_extra_config.get("connectors") or ())


def is_ours(kv: Any) -> bool:
    """Return whether this KVTransferConfig configures cornplug as the only KV connector."""
    return kv is not None and kv.kv_connector == KV_CONNECTOR


def our_settings(kv: Any) -> dict[str, Any] | None:
    """Return cornplug's settings from a KVTransferConfig, or None if cornplug is not one of its connectors.
    Changes to the returned dict change the configuration."""
    if is_ours(kv):
        return kv.kv_connector_extra_config
    for child in child_connectors(kv):
        if child.get("kv_connector") == KV_CONNECTOR:
            return child.setdefault("kv_connector_extra_config", {})
    return None


def has_ours(kv: Any) -> bool:
    """Return whether a KVTransferConfig configures cornplug, alone or together with other connectors."""
    return our_settings(kv) is not None


def all_our_settings(config: Any) -> list[dict[str, Any]]:
    """Return cornplug's settings from each of its connectors in engine arguments or a VllmConfig."""
    kv, ec = getattr(config, "kv_transfer_config", None), getattr(config, "ec_transfer_config", None)
    found = [our_settings(kv)]
    if ec is not None and ec.ec_connector == EC_CONNECTOR:
        found.append(ec.ec_connector_extra_config)
    return [said for said in found if said is not None]


def config_from_settings(all_settings: list[dict[str, Any]]) -> Config:
    """Return the Config for a nonempty result of `all_our_settings`. The encoder-cache connector's settings
    have precedence."""
    return load_settings(dict(all_settings[-1]))


def combine_connectors(other: Any, ours: Any) -> Any:
    """Return a KVTransferConfig with the connectors of `other`, followed by `ours`."""
    from vllm.config import KVTransferConfig

    if other.kv_connector is None:
        return ours
    children = child_connectors(other) if other.kv_connector == _MULTI else [_as_child(other)]
    return KVTransferConfig(
        kv_connector=_MULTI,
        # The outer connector must save and load, even if the other connector's role is only producer or only
        # consumer.
        kv_role="kv_both",
        kv_load_failure_policy=ours.kv_load_failure_policy,
        kv_connector_extra_config={"connectors": [*children, _as_child(ours)]},
        **{name: getattr(other, name) for name in _OUTER_FIELDS},
    )


def add_offloading(kv: Any, size_gib: float, backend: str) -> Any:
    """Return a KVTransferConfig with the connector for `--kv-offloading-size`, followed by the connectors of
    `kv`."""
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
        return combine_connectors(first, kv)
    kv.kv_connector_extra_config["connectors"] = [_as_child(first), *child_connectors(kv)]
    return kv


def _as_child(kv: Any) -> dict[str, Any]:
    """Convert a KVTransferConfig to the settings of a child of MultiConnector. Only values that differ from
    vLLM's defaults are included."""
    plain = type(kv)(kv_connector=kv.kv_connector, kv_role=kv.kv_role)
    names = [one.name for one in dataclasses.fields(kv) if one.name != "engine_id"]
    given = {name: getattr(kv, name) for name in names if getattr(kv, name) != getattr(plain, name)}
    return {"kv_connector": kv.kv_connector, "kv_role": kv.kv_role, **given}
