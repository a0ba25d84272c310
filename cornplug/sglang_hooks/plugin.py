"""What SGLang's entry point `sglang.srt.plugins` calls, in every process of every server.

SGLang swallows what a plugin raises and logs the hooks that it could not apply. Here nothing
happens in a server that did not ask for cornplug, beyond its flags; and in one that did, what
cannot work stops the process with the reason.
"""

from __future__ import annotations

import pkgutil
import sys
from types import MethodType
from typing import Any

from cornplug.engine_side.settings import SETTINGS
from cornplug.errors import ConfigError
from cornplug.sglang_hooks import active, compat
from cornplug.sglang_hooks.compat import Hook
from cornplug.sglang_hooks.flags import ENABLE

_registered: dict[str, Hook] = {}


def register() -> None:
    """Hook the flags; in the processes of a server that shares, everything.

    Raises SystemExit, which SGLang lets through, where cornplug was asked for and this SGLang
    is not one that it knows.
    """
    from cornplug.sglang_hooks import flags

    why = untested()
    if why and _asked_for():
        raise SystemExit(f"cornplug: {why}")
    if why:
        return
    _register(flags.HOOKS)
    if active.is_on():
        _register(_hooks())  # SGLang applies them when all plugins have had their turn


def install() -> None:
    """Hook everything now: the main process knows only from its flags that it shares.

    Raises ConfigError where this SGLang lacks a target, or another plugin holds it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register(_hooks())
    HookRegistry.apply_hooks()
    verify()


def verify(*_args: Any, **_kwargs: Any) -> None:
    """Raise ConfigError unless every hook of this process is in its place."""
    missing = sorted(name for name, hook in _registered.items() if not is_applied(hook))
    if missing:
        raise ConfigError(
            ENABLE,
            f"SGLang {compat.sglang_version()} cannot be hooked at {', '.join(missing)}",
            "Its log says why. Leave the flag out, or the plugin that holds the same place (SGLANG_PLUGINS).",
        )


def untested() -> str:
    """Why this SGLang is refused; "" for one in the tested range."""
    version = compat.sglang_version()
    if version is not None and compat.is_tested(version):
        return ""
    low, high = (".".join(map(str, v)) for v in compat.TESTED)
    return (
        f"SGLang {version} is outside the tested range >={low},<{high}; install a release of cornplug for it"
    )


def is_applied(hook: Hook) -> bool:
    """Whether SGLang's function at `hook.target` now runs `hook.function`."""
    try:
        found: Any = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    if isinstance(found, MethodType):
        found = found.__func__
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if found is hook.function or any(cell.cell_contents is hook.function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _hooks() -> tuple[Hook, ...]:
    from cornplug.sglang_hooks import (
        embeddings,
        epd,
        epd_fallback,
        hicache_settings,
        kv_names,
        media,
        named,
        weights,
    )

    return (
        *hicache_settings.HOOKS,
        *named.HOOKS,
        *kv_names.HOOKS,
        *media.HOOKS,
        *embeddings.HOOKS,
        *epd.HOOKS,
        *epd_fallback.HOOKS,
        *weights.HOOKS,
        # The first thing that each process does once its plugins are loaded.
        Hook("sglang.srt.runtime_context.publish", "before", verify),
    )


def _register(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("cornplug", "cornplug")
    for hook in hooks:
        name = f"{hook.target} ({hook.function.__module__}.{hook.function.__qualname__})"
        if name not in _registered:
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind), source=source)
            _registered[name] = hook


def _asked_for() -> bool:
    names = {argument.partition("=")[0] for argument in sys.argv[1:]}
    return active.is_on() or not names.isdisjoint({ENABLE, *SETTINGS})
