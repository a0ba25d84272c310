"""Registers cornplug with vLLM, through the entry point `vllm.general_plugins`. Every vLLM process calls
`register`, and some processes call it twice.

vLLM does not catch exceptions from this call. An exception would also stop engines that do not use cornplug.
Therefore, with an unsupported version of vLLM, `register` only logs a warning, and engines run as stock vLLM
(`flags.stock_wrappers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR

_state: dict[str, bool | str] = {"registered": False}


def is_registered() -> bool:
    """Return whether `register` has completed in this process."""
    return bool(_state["registered"])


def disabled_reason() -> str:
    """Return the reason why `register` did nothing, or "" if it completed or has not been called yet."""
    return str(_state.get("why", ""))


def register() -> None:
    """Add cornplug's command-line flags, register both connectors, and wrap the vLLM functions that cornplug
    changes. Does nothing if this process is already registered."""
    if is_registered():
        return
    why = compat.SUPPORTED_VERSIONS.explain_mismatch()
    if not why:
        try:
            _install()
        except (AttributeError, ImportError) as e:
            version = compat.SUPPORTED_VERSIONS.installed_version()
            why = f"vLLM {version} differs from the release with that version number: {e}"
    if why:
        _state["why"] = why
        compat.logger.warning("cornplug is disabled: %s", why)
        _install_flags(why)
        return
    _state["registered"] = True


def _install_flags(why: str) -> None:
    """Add cornplug's flags without effect, so that stock engines accept command lines with these flags. Log a
    warning if this vLLM's functions cannot be wrapped."""
    try:
        from cornplug.vllm_connector import flags

        compat.wrap_all(flags.stock_wrappers(why))
    except (AttributeError, ImportError) as e:
        compat.logger.warning("cornplug: cannot add cornplug's flags to this release of vLLM: %s", e)


def _all_wrappers() -> list[tuple[str, str, Callable[..., Any]]]:
    """Return (module, function's qualified name, wrapper) for each vLLM function that cornplug wraps."""
    from cornplug.vllm_connector import connector_config, cpu_use, flags
    from cornplug.vllm_connector.kv import page_keys, pauses
    from cornplug.vllm_connector.media import late_misses, mm_identifiers, partial_models, served_images
    from cornplug.vllm_connector.model import reloads, weight_updates

    kv = page_keys, pauses
    media = late_misses, mm_identifiers, partial_models, served_images
    modules = (flags, connector_config, cpu_use, *kv, *media, reloads, weight_updates)
    return [seam for module in modules for seam in module.WRAPS]


def _install() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from cornplug.vllm_connector.media import mm_identifiers, served_images

    compat.wrap_all(_all_wrappers())
    if KV_CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            KV_CONNECTOR, "cornplug.vllm_connector.kv_connector", KV_CONNECTOR
        )
    if EC_CONNECTOR not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(
            EC_CONNECTOR, "cornplug.vllm_connector.ec_connector", EC_CONNECTOR
        )
    mm_identifiers.add_start_watcher(served_images.on_engine_start)
