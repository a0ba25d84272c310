"""Configures SGLang's hierarchical cache (HiCache) for sharing KV pages.

If an operator's flags exclude sharing, `check_flags` raises an error before any process starts.
`declare_settings` decides the remaining settings during SGLang's own resolution, when the model, dtype and
attention backend are resolved. If KV can be shared, `declare_settings` declares the settings that the
operator did not set. If KV cannot be shared, the server runs with exactly its stock settings.

SGLang's host pool layout and its copy engine are not changed. In every host layout, a shared page
`[kv_head][layer][K,V][token][dim]` consists of contiguous ranges of `dim` values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cornplug.config import Config
from cornplug.errors import ConfigError
from cornplug.identity import LINK_TOKENS
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.kv import exclusions

BACKEND: Final = {
    "backend_name": "cornplug",
    "module_path": "cornplug.sglang_hooks.kv.hicache_storage",
    "class_name": "CornplugStorage",
    "interface_v1": 1,
}
"""Settings that make SGLang's "dynamic" storage load `CornplugStorage`."""

SECOND_REQUEST_POLICY: Final = "write_through_selective"
"""SGLang's write policy that offers a page to the storage when a second request uses the page."""

_EMBEDDINGS_ONLY: Final = "or set CORNPLUG_ENGINE_SHARE_KV=false to share only embeddings"

# (ServerArgs field, default value, flag) of other features that control the host side of the KV cache.
CONFLICTING_FLAGS: Final = (
    ("disable_radix_cache", False, "--disable-radix-cache"),
    ("enable_unified_cache_external_linker", False, "--enable-unified-cache-external-linker"),
    ("enable_lmcache", False, "--enable-lmcache"),
    ("enable_flexkv", False, "--enable-flexkv"),
    ("enable_hisparse", False, "--enable-hisparse"),
    ("radix_cache_backend", None, "--radix-cache-backend"),
    # In other modes, backups bypass the hook that records a page's hash. SGLang also treats a page as stored
    # even if the store was full and rejected it.
    ("hicache_host_memory_mode", "cache", "--hicache-host-memory-mode"),
)


def check_flags(server_args: Any, config: Config) -> None:
    """Raise ConfigError if an operator's flag cannot be combined with cornplug.

    `server_args` are the operator's settings before SGLang resolves them. If the deployment cannot share KV
    for another reason, this does not raise an error, and `declare_settings` logs the reason.
    """
    if not config.engine.share_kv or exclusions.deployment_exclusion(server_args):
        return
    if server_args.attention_backend is not None and exclusions.ngram_exclusion(server_args):
        return
    _check_conflicts(server_args)
    if server_args.page_size is not None:
        _check_page_size(server_args.page_size, config.engine.page_tokens)
    _operator_extra(server_args)


def declare_settings(server_args: Any) -> None:
    """Declare the settings that KV sharing needs, or log why KV is not shared.

    Called during SGLang's resolution, after SGLang has resolved the model and attention backend.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if not activation.is_on() or not activation.config().engine.share_kv:
        return
    settled = resolving_view(server_args)
    config = activation.config()
    page = config.engine.page_tokens
    if why := exclusions.exclusion_reason(server_args, page) or _compiler_problem():
        logger.warning("cornplug: KV is not shared, only embeddings: %s", why)
        if is_cornplug_storage(settled):  # The operator enabled HiCache explicitly.
            declare_resolution(server_args, "cornplug", hicache_storage_backend=None)
        return
    if exclusions.is_default_page_size(server_args):
        declare_resolution(server_args, "cornplug", page_size=exclusions.choose_page_size(settled, page))
    extra = storage_settings(settled.page_size, config, _operator_extra(server_args))
    declare_resolution(
        server_args,
        "cornplug",
        enable_hierarchical_cache=True,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_write_policy=_write_policy(settled.hicache_write_policy, config),
    )


def storage_settings(page_size: int, config: Config, operator_extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra config for SGLang's storage, merged with the values that the operator set."""
    return {
        # Even a prefix of a single page is worth a lookup, because the store replies in 0.1 ms.
        "prefetch_threshold": page_size,
        # Seconds that SGLang waits for a prefetch before it computes the tokens. SGLang adds time per page.
        "prefetch_timeout_base": config.store.background_timeout_s,
        # Without this setting, a backup has the hashes of its own pages but not of the preceding pages.
        "hicache_storage_pass_prefix_keys": True,
        **operator_extra,
        **BACKEND,
    }


def _write_policy(resolved: str, config: Config) -> str:
    """Return SGLang's write policy for `engine.save`.

    "write_through_selective" copies a page to host memory and offers it to the storage when a second request
    uses the page. If the operator set "write_back", it is kept.
    """
    if config.engine.save == "second" and resolved == "write_through":
        return SECOND_REQUEST_POLICY
    return resolved


def _compiler_problem() -> str:
    try:
        compile_hash()
    except ConfigError as e:
        return str(e)
    return ""


def is_cornplug_storage(server_args: Any) -> bool:
    """Return whether cornplug is the storage of this server's HiCache."""
    backend, extra = server_args.hicache_storage_backend, server_args.hicache_storage_backend_extra_config
    return backend == "dynamic" and cornplug_extra(extra) is not None


def cornplug_extra(text: str | None) -> dict[str, Any] | None:
    """Return the extra config of SGLang's "dynamic" storage if it names cornplug's storage, else None."""
    try:
        extra = json.loads(text or "{}")
    # The value is "@FILE" or invalid JSON. SGLang raises an error for invalid JSON.
    except json.JSONDecodeError:
        return None
    ours = isinstance(extra, dict) and extra.get("class_name") == BACKEND["class_name"]
    return extra if ours else None


def _check_conflicts(server_args: Any) -> None:
    for field, plain, flag in CONFLICTING_FLAGS:
        if getattr(server_args, field) != plain:
            _raise_conflict(flag, "because cornplug needs SGLang's hierarchical cache", f"Remove {flag}")
    backend = server_args.hicache_storage_backend
    if backend is not None and not is_cornplug_storage(server_args):
        _raise_conflict(
            f"--hicache-storage-backend {backend}",
            "because cornplug is a storage backend itself",
            "Remove one of the two flags",
        )
    if str(server_args.hicache_storage_backend_extra_config or "").startswith("@"):
        _raise_conflict(
            "--hicache-storage-backend-extra-config @FILE",
            "because cornplug adds keys to it",
            "Pass it as a JSON object, or remove it",
        )


def _operator_extra(server_args: Any) -> dict[str, Any]:
    text = server_args.hicache_storage_backend_extra_config or "{}"
    flag = "--hicache-storage-backend-extra-config"
    try:
        given = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(flag, f"invalid JSON: {e}", "Correct it, or remove it.") from e
    if not isinstance(given, dict):
        raise ConfigError(flag, "not a JSON object", "Correct it, or remove it.")
    return given


def compile_hash() -> None:
    """Compile SGLang's page hash. This is necessary only once per machine.

    Otherwise SGLang would compile the hash at its first call, on the thread that handles lookups. For half a
    minute, every request would then wait until its lookup times out. Raises ConfigError if the compilation
    fails.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0] * LINK_TOKENS, page_size=LINK_TOKENS)
    except RuntimeError as e:
        raise ConfigError(
            "--enable-cornplug",
            f"SGLang cannot compile its page hash: {e.__cause__ or e}",
            f"Install a C++ compiler and OpenSSL's headers (libssl-dev), {_EMBEDDINGS_ONLY}.",
        ) from e


def _check_page_size(page_size: int, page_tokens: int) -> None:
    if not exclusions.page_size_fits(page_size, page_tokens):
        _raise_conflict(
            f"--page-size {page_size}",
            f"because cornplug shares pages of {page_tokens} tokens (--cornplug-page-tokens)",
            f"Choose a multiple of {LINK_TOKENS} that divides {page_tokens} or is a multiple of it",
        )


def _raise_conflict(flag: str, why: str, remedy: str) -> None:
    raise ConfigError(
        flag, f"cannot be combined with --enable-cornplug, {why}", f"{remedy}, {_EMBEDDINGS_ONLY}."
    )


HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.arg_groups.hicache_hook.handle_hicache", "before", declare_settings),
)
