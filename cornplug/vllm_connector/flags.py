"""Command-line flags for `vllm serve MODEL --kv-connector cornplug`.

The flags only fill `--kv-transfer-config` and `--ec-transfer-config`. You can also write these two options in
their JSON form, with the same `kv_connector_extra_config`:

    --kv-transfer-config '{"kv_connector": "CornplugConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"engine.app": "chat"}}'

With `--kv-connector cornplug`, `--kv-transfer-config` names a second KV connector (for example NIXL or
LMCache) that runs alongside cornplug.

If a user upgrades vLLM to a release that cornplug does not support, engines must not fail to start with
"unrecognized arguments". With such a release, `stock_wrappers` replaces `WRAPS`. cornplug's flags are then
still parsed, its connectors are removed from the configuration, a log line gives the reason, and engines run
as stock vLLM.

cornplug also runs alongside other KV connectors (vLLM's MultiConnector). MultiConnector loads a request's
prefix from the first connector that has any of its tokens, and saves to all connectors. The other connectors
are listed before cornplug. Thus a decode server loads KV from its prefill server, and native offloading loads
the KV that it has offloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from cornplug.config import Config
from cornplug.engine_common.shared_flags import (
    SHARED_FLAGS,
    add_flags,
    flag_dest,
    load_settings,
    settings_from_flags,
)
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR

NAME = "cornplug"
_MULTI: Final = "MultiConnector"
_OUTER_FIELDS: Final = ("engine_id", "kv_buffer_device", "kv_port")
"""Fields of KVTransferConfig that vLLM or a connector reads from the outer config. In addition,
MultiConnector copies the engine's id to each child."""


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    parser = original(parser)
    add_flags(
        parser,
        "--kv-connector",
        choices=[NAME, *sorted(KVConnectorFactory._registry)],
        metavar="NAME",
        default=None,
        help="Name of a KV connector. 'cornplug' sets --kv-transfer-config and --ec-transfer-config. If you "
        "also set --kv-transfer-config, its connector runs alongside cornplug. Any other registered name "
        "sets --kv-transfer-config with kv_role=kv_both.",
    )
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    name = getattr(args, "kv_connector", None)
    extra = settings_from_flags(args)
    if name is None:
        if extra:
            raise ValueError("--cornplug-* options need --kv-connector cornplug")
        return original(cls, args)
    other = args.kv_transfer_config
    if other is not None and (name != NAME or has_ours(other)):
        raise ValueError(
            "--kv-connector and --kv-transfer-config are mutually exclusive unless the connector is cornplug"
        )
    kv, ec = transfer_configs(name, extra)
    args.kv_transfer_config = kv if other is None else combine_connectors(other, kv)
    if ec is not None:
        if args.ec_transfer_config is not None:
            raise ValueError(
                "--kv-connector cornplug sets --ec-transfer-config itself. To combine it with another "
                "encoder connector, pass the complete --kv-transfer-config"
            )
        args.ec_transfer_config = ec
    # vLLM may parse the same namespace again in a child process.
    args.kv_connector = None
    for flag in SHARED_FLAGS:
        setattr(args, flag_dest(flag), None)
    return original(cls, args)


def transfer_configs(name: str, extra: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """Return vLLM's (KVTransferConfig, ECTransferConfig or None) for `--kv-connector name`.

    Raises ConfigError for invalid settings, before any process is started.
    """
    from vllm.config import ECTransferConfig, KVTransferConfig

    if name != NAME:
        return KVTransferConfig(kv_connector=name, kv_role="kv_both"), None
    load_settings(extra)
    kv = KVTransferConfig(
        kv_connector=KV_CONNECTOR,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(extra),
    )
    ec = ECTransferConfig(ec_connector=EC_CONNECTOR, ec_role="ec_both", ec_connector_extra_config=dict(extra))
    return kv, ec


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args", _add_cli_args),
    ("vllm.engine.arg_utils", "EngineArgs.from_cli_args", _from_cli_args),
)


def stock_wrappers(why: str) -> list[tuple[str, str, Callable[..., Any]]]:
    """Return the wrappers to use while cornplug is disabled, as (module, function's qualified name, wrapper).
    `why` is the reason that the wrappers log."""
    arguments = "vllm.engine.arg_utils"
    return [
        (arguments, "EngineArgs.add_cli_args", _add_stock_args),
        (arguments, "EngineArgs.from_cli_args", functools.partial(_from_stock_args, why)),
        (arguments, "EngineArgs.create_engine_config", functools.partial(_create_as_stock, why)),
    ]


def _add_stock_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    # A later release of vLLM may have its own flag with this name.
    with contextlib.suppress(argparse.ArgumentError):
        add_flags(
            parser,
            "--kv-connector",
            metavar="NAME",
            default=None,
            help="Name of a KV connector. 'cornplug' has no effect with this release of vLLM.",
        )
    return parser


def _from_stock_args(why: str, original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    name = getattr(args, "kv_connector", None)
    if name == NAME or settings_from_flags(args):
        _warn_no_effect("--kv-connector cornplug", why)
    elif name is not None and args.kv_transfer_config is None:
        args.kv_transfer_config, _ = transfer_configs(name, {})
    args.kv_connector = None
    for flag in SHARED_FLAGS:
        setattr(args, flag_dest(flag), None)
    return original(cls, args)


def _create_as_stock(why: str, original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Create the VllmConfig without cornplug's connectors, which are not registered with this release of
    vLLM."""
    kv, ec = getattr(args, "kv_transfer_config", None), getattr(args, "ec_transfer_config", None)
    ours = [has_ours(kv), ec is not None and ec.ec_connector == EC_CONNECTOR]
    if any(ours):
        args = copy.deepcopy(args)
        args.kv_transfer_config = _without_ours(args.kv_transfer_config)
        args.ec_transfer_config = None if ours[1] else ec
        _warn_no_effect("cornplug's connector", why)
    return original(args, *rest, **kwargs)


def _without_ours(kv: Any) -> Any | None:
    """Return the KV transfer configuration without cornplug, or None if no other KV connector is
    configured."""
    if kv is None or is_ours(kv):
        return None
    if has_ours(kv):
        left = [child for child in child_connectors(kv) if child.get("kv_connector") != KV_CONNECTOR]
        kv.kv_connector_extra_config["connectors"] = left
        return kv if left else None
    return kv


def _warn_no_effect(subject: str, why: str) -> None:
    compat.logger.warning("cornplug: %s has no effect, and this engine runs as stock vLLM: %s", subject, why)


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
