"""Fallback for vLLM releases that cornplug does not support. Command lines with cornplug's flags still start
engines, which run as stock vLLM.

After an upgrade of vLLM, an engine's start must not fail with "unrecognized arguments". Therefore cornplug's
flags are still parsed, its connectors are removed from the configuration, and a log line gives the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

from cornplug.engine_common.shared_flags import SETTINGS, add_group, dest, extra_config
from cornplug.vllm_connector import compat, flags
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR
from cornplug.vllm_connector.several_connectors import connectors, has_ours, is_ours


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    # A later release of vLLM may have its own flag with this name.
    with contextlib.suppress(argparse.ArgumentError):
        add_group(
            parser,
            "--kv-connector",
            metavar="NAME",
            default=None,
            help="Name of a KV connector. 'cornplug' has no effect with this release of vLLM.",
        )
    return parser


def _from_cli_args(why: str, original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    name = getattr(args, "kv_connector", None)
    if name == flags.NAME or extra_config(args):
        _warn("--kv-connector cornplug", why)
    elif name is not None and args.kv_transfer_config is None:
        args.kv_transfer_config, _ = flags.transfer_configs(name, {})
    args.kv_connector = None
    for flag in SETTINGS:
        setattr(args, dest(flag), None)
    return original(cls, args)


def _create(why: str, original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Create the VllmConfig without cornplug's connectors, which are not registered with this release of
    vLLM."""
    kv, ec = getattr(args, "kv_transfer_config", None), getattr(args, "ec_transfer_config", None)
    ours = [has_ours(kv), ec is not None and ec.ec_connector == EC_CONNECTOR]
    if any(ours):
        args = copy.deepcopy(args)
        args.kv_transfer_config = _others(args.kv_transfer_config)
        args.ec_transfer_config = None if ours[1] else ec
        _warn("cornplug's connector", why)
    return original(args, *rest, **kwargs)


def _others(kv: Any) -> Any | None:
    """Return the KV transfer configuration without cornplug, or None if no other KV connector is
    configured."""
    if kv is None or is_ours(kv):
        return None
    if has_ours(kv):
        left = [child for child in connectors(kv) if child.get("kv_connector") != KV_CONNECTOR]
        kv.kv_connector_extra_config["connectors"] = left
        return kv if left else None
    return kv


def _warn(asked: str, why: str) -> None:
    compat.logger.warning("cornplug: %s has no effect, and this engine runs as stock vLLM: %s", asked, why)


def wraps(why: str) -> list[tuple[str, str, Callable[..., Any]]]:
    """Return (module, function's qualified name, wrapper) for each vLLM function to wrap while cornplug is
    disabled. `why` is the reason that the wrappers log."""
    arguments = "vllm.engine.arg_utils"
    return [
        (arguments, "EngineArgs.add_cli_args", _add_cli_args),
        (arguments, "EngineArgs.from_cli_args", functools.partial(_from_cli_args, why)),
        (arguments, "EngineArgs.create_engine_config", functools.partial(_create, why)),
    ]
