"""The function of SGLang's entry point `sglang.srt.plugins`, called in every process of every server.

A server without cornplug gets its flags and no other change. In a server with it, a hook that cannot work
stops the process with the reason.
"""

from __future__ import annotations

import sys

from cornplug.engine_common.shared_flags import SETTINGS
from cornplug.sglang_hooks import activation, compat, hook_registry
from cornplug.sglang_hooks.activation import ENABLE


def register() -> None:
    """Hook the flags; in the processes of a server that shares, also the parts that the server needs.

    Raises SystemExit, which SGLang lets through, where cornplug was asked for and this SGLang
    is not one that it knows.
    """
    from cornplug.sglang_hooks import flags

    why = compat.SUPPORTED_VERSIONS.refusal()
    if why and _asked_for():
        raise SystemExit(f"cornplug: {why}")
    if why:
        return
    hook_registry.register(flags.HOOKS)
    needed = activation.needed() if activation.is_on() else None
    if needed is not None:
        hook_registry.register_parts(needed)


def _asked_for() -> bool:
    names = {argument.partition("=")[0] for argument in sys.argv[1:]}
    return activation.is_on() or not names.isdisjoint({ENABLE, *SETTINGS})
