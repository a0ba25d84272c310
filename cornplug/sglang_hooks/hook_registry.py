"""Registers hooks with SGLang, and verifies that SGLang has applied them.

SGLang catches the exceptions of a plugin, and only logs the hooks that it could not apply.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from types import MethodType
from typing import Any, Final

from cornplug.errors import ConfigError
from cornplug.sglang_hooks import hook_selection
from cornplug.sglang_hooks.activation import ENABLE
from cornplug.sglang_hooks.compat import SUPPORTED_VERSIONS, Hook

_registered: dict[str, Hook] = {}


def install(needed: Iterable[str]) -> None:
    """Install the hooks of these parts now. The main process selects them from its settings, after plugins
    were loaded.

    Raises ConfigError if this SGLang does not have a target or has another kind of function there, or if
    another plugin has replaced it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    register_parts(needed)
    HookRegistry.apply_hooks()
    verify()


def verify(*_args: Any, **_kwargs: Any) -> None:
    """Raise ConfigError unless every hook of this process is installed."""
    missing = sorted(name for name, hook in _registered.items() if not is_applied(hook))
    if missing:
        raise ConfigError(
            ENABLE,
            f"cornplug cannot hook SGLang {SUPPORTED_VERSIONS.installed()} at {', '.join(missing)}",
            "See SGLang's log for the reason. Remove the flag, or the plugin that replaces the same "
            "function (SGLANG_PLUGINS).",
        )
    unlike = sorted(f"{name}: {why}" for name, hook in _registered.items() if (why := misfit(hook)))
    if unlike:
        raise ConfigError(
            ENABLE,
            f"SGLang {SUPPORTED_VERSIONS.installed()} has functions with other parameters: "
            f"{'; '.join(unlike)}",
            "Install a release of cornplug that supports it, or remove the flag.",
        )


def is_applied(hook: Hook) -> bool:
    """Return whether SGLang's function at `hook.target` now runs `hook.function`."""
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


def misfit(hook: Hook) -> str:
    """Reason why a hook cannot accept the calls of its target, or "" if it can.

    The check passes every parameter of the target, by position and by name, so that an added or renamed
    parameter is detected here and not by the first request.
    """
    if hook.kind == "replace":
        return ""
    first = () if hook.kind == "before" else (None,)
    found = pkgutil.resolve_name(hook.target)
    # The hook of a class method gets `cls`.
    found = found.__func__ if isinstance(found, MethodType) else found
    target = inspect.signature(found).parameters.values()
    plain = [p for p in target if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in target if p.kind is p.KEYWORD_ONLY}
    ours = inspect.signature(hook.function)
    if unknown := sorted(set(hook.reads) - {p.name for p in target}):
        return f"no parameter {', '.join(unknown)}"
    # A method's own object and unnamed parameters are always passed by position.
    fixed = sum(p.kind is p.POSITIONAL_ONLY or p.name in ("self", "cls") for p in plain)
    try:
        ours.bind(*first, *(None for _ in plain), **named)
        by_name = {p.name: None for p in plain[fixed:]}
        ours.bind(*first, *(None for _ in plain[:fixed]), **by_name, **named)
    except TypeError as e:
        return str(e)
    return ""


def register_parts(needed: Iterable[str]) -> None:
    """Register the hooks of these parts with SGLang, and the check that they are installed."""
    register((*hook_selection.hooks(needed), _LAST))


def register(hooks: tuple[Hook, ...]) -> None:
    """Register these hooks with SGLang, which applies them after all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("cornplug", "cornplug")
    for hook in hooks:
        name = f"{hook.target} ({hook.function.__module__}.{hook.function.__qualname__})"
        if name not in _registered:
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind), source=source)
            _registered[name] = hook


# Each process calls this first after its plugins are loaded.
_LAST: Final = Hook("sglang.srt.runtime_context.publish", "before", verify)
