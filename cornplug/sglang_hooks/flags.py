"""`sglang serve MODEL --enable-cornplug` and its `--cornplug-*` options.

SGLang's help lists these flags, and its `--config` file may contain them. Each of these flags enables
cornplug. To enable cornplug from Python, call `share` before you create the engine:

    from cornplug.sglang_hooks.flags import share

    share({"engine.app": "chat"})
    engine = sgl.Engine(model_path="Qwen/Qwen2-VL-2B-Instruct")
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

from cornplug.engine_common.shared_flags import add_flags, flag_dest, settings_from_flags
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.activation import ENABLE
from cornplug.sglang_hooks.compat import SUPPORTED_VERSIONS, Hook, logger


def share(extra: Mapping[str, str] | None = None) -> None:
    """Enable sharing for engines that this process creates from now on.

    Args:
        extra: {"section.field": value}, for example `engine.app` or `store.socket`.

    If the installed SGLang is outside the tested range, this logs a warning, and engines run as stock SGLang.

    Raises ConfigError if a setting is unknown or invalid.
    """
    if why := SUPPORTED_VERSIONS.explain_mismatch():
        _run_as_stock(why)
        return
    activation.turn_on(extra or {})


def _add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ENABLE,
        action="store_true",
        help="Share KV and embeddings with default settings. Each --cornplug-* option implies this flag. It "
        "enables SGLang's hierarchical cache (HiCache) with cornplug as its storage, and keeps HiCache "
        "flags that you set.",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    extra = settings_from_flags(args)
    if extra or getattr(args, flag_dest(ENABLE), False):
        share(extra)
    else:
        activation.turn_off()
    return original(cls, args)


def _from_cli_args_as_stock(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    if settings_from_flags(args) or getattr(args, flag_dest(ENABLE), False):
        _run_as_stock(SUPPORTED_VERSIONS.explain_mismatch())
    return original(cls, args)


def _run_as_stock(why: str) -> None:
    activation.turn_off()
    logger.warning("cornplug: %s has no effect, and this server runs as stock SGLang: %s", ENABLE, why)


_ADD_ARGS_HOOK: Final = Hook("sglang.srt.server_args.ServerArgs.add_cli_args", "after", _add_cli_args)
STOCK_HOOKS: tuple[Hook, ...] = (
    _ADD_ARGS_HOOK,
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", "around", _from_cli_args_as_stock),
)
"""Hooks for SGLang versions outside the tested range."""
HOOKS: tuple[Hook, ...] = (
    _ADD_ARGS_HOOK,
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", "around", _from_cli_args),
)
