"""Entry point `sglang.srt.plugins`, called in every process of every server.

A server without cornplug gets its flags and no other change. In a server with cornplug, a hook that cannot
work stops the process with the reason. An SGLang outside of the tested range runs as stock, regardless of
flags.
"""

from __future__ import annotations

from cornplug.sglang_hooks import activation, compat, hook_registry


def register() -> None:
    """Hook the flags and, in processes of a server that shares, the parts that the server needs."""
    from cornplug.sglang_hooks import flags

    if compat.SUPPORTED_VERSIONS.refusal():
        hook_registry.register(flags.STOCK_HOOKS)
        return
    hook_registry.register(flags.HOOKS)
    needed = activation.needed() if activation.is_on() else None
    if needed is not None:
        hook_registry.register_parts(needed)
