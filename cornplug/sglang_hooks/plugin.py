"""Entry point `sglang.srt.plugins`, called in every process of every server.

In a server that does not enable cornplug, this only adds cornplug's flags. In a server that does, a process
stops with an error if a hook cannot work. If the installed SGLang is outside of the tested range, servers run
as stock SGLang regardless of the flags.
"""

from __future__ import annotations

from cornplug.sglang_hooks import activation, compat, hook_registry


def register() -> None:
    """Register the hooks for cornplug's flags and, in child processes of a sharing server, the hooks that the
    server needs."""
    from cornplug.sglang_hooks import flags

    if compat.SUPPORTED_VERSIONS.refusal():
        hook_registry.register(flags.STOCK_HOOKS)
        return
    hook_registry.register(flags.HOOKS)
    needed = activation.needed() if activation.is_on() else None
    if needed is not None:
        hook_registry.register_parts(needed)
