"""The settings of SGLang's hierarchical cache (HiCache) under which it shares KV pages.

What the operator gave stays; what was not given is set as if it had been. Given settings that
exclude sharing are an error here, before any process starts. Where the model or the deployment
excludes it, the server runs without shared KV and says so in one line.

The host pool's layout and copy engine stay SGLang's own: whatever they are, the contiguous runs
between a host page and a shared page `[kv_head][layer][K,V][token][dim]` are of `dim` values.
"""

from __future__ import annotations

import json
from typing import Any, Final

from cornplug.checkpoint import Checkpoint
from cornplug.config import Config
from cornplug.errors import CheckpointError, ConfigError
from cornplug.identity import LINK_TOKENS
from cornplug.sglang_hooks import active
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.model import UNVERIFIABLE_FORMATS

BACKEND: Final = {
    "backend_name": "cornplug",
    "module_path": "cornplug.sglang_hooks.hicache",
    "class_name": "CornplugStorage",
    "interface_v1": 1,
}
"""How SGLang's "dynamic" storage finds ours."""

_LEAST_ROOM_BYTES: Final = 1 << 30
"""Less than this for all host pools is not worth having, and may be gone once the model is loaded."""
_EMBEDDINGS_ONLY: Final = "or share embeddings only, with CORNPLUG_ENGINE_SHARE_KV=false"

# (ServerArgs field, what it is when not given, its flag): the other owners of the KV's host side.
_RIVALS: Final = (
    ("disable_radix_cache", False, "--disable-radix-cache"),
    ("enable_unified_cache_external_linker", False, "--enable-unified-cache-external-linker"),
    ("enable_lmcache", False, "--enable-lmcache"),
    ("enable_flexkv", False, "--enable-flexkv"),
    ("enable_hisparse", False, "--enable-hisparse"),
    ("radix_cache_backend", None, "--radix-cache-backend"),
)
# (field, its widest value that still shares KV, flag): pages are of whole sequences and all layers.
_DEPLOYMENTS: Final = (
    ("pp_size", 1, "--pp-size"),
    ("nnodes", 1, "--nnodes"),
    ("dcp_size", 1, "--dcp-size"),
    ("attn_cp_size", 1, "--attn-cp-size"),
    ("attn_dp_size", 1, "--attn-dp-size"),
    ("disaggregation_mode", "null", "--disaggregation-mode"),
    ("speculative_algorithm", None, "--speculative-algorithm"),
    ("dllm_algorithm", None, "--dllm-algorithm"),
    ("enable_prefill_cp", False, "--enable-prefill-cp"),
    ("encoder_only", False, "--encoder-only"),
    ("is_embedding", False, "--is-embedding"),
    ("enable_dp_attention", False, "--enable-dp-attention"),
    ("use_ray", False, "--use-ray"),  # its actors do not inherit that this server shares
)
# Fields of a text config whose presence says that a token's state is not in K and V of full attention alone.
_HYBRID_FIELDS: Final = (
    "attention_chunk_size",
    "attn_type_list",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_state_size",
)


def fill_in(server_args: Any, config: Config) -> None:
    """Set what was not given. `server_args` are the operator's own, not yet resolved.

    Raises ConfigError that names both flags, where a given setting excludes sharing.
    """
    if not config.engine.share_kv:
        return
    if why := _excluded(server_args) or ("" if server_args.enable_hierarchical_cache else _no_room()):
        logger.warning("cornplug: KV is not shared, only embeddings: %s", why)
        return
    _refuse_rivals(server_args)
    page = config.engine.page_tokens
    if server_args.page_size is None:
        server_args.page_size = page
        _check_chunk(server_args, page)
    _check_page(server_args.page_size, page)
    given = _given_extra(server_args)
    compile_hash()
    server_args.enable_hierarchical_cache = True
    server_args.hicache_storage_backend = "dynamic"
    server_args.hicache_storage_backend_extra_config = json.dumps(
        {
            # A prefix of a single page is worth asking for: the store answers in 0.1 ms.
            "prefetch_threshold": server_args.page_size,
            # SGLang waits so long for a prefetch, and some for each page, before it computes.
            "prefetch_timeout_base": config.store.patience_s,
            # Without them a backup says its own hash only, not what came before it.
            "hicache_storage_pass_prefix_keys": True,
            **given,
            **BACKEND,
        }
    )


def settle(server_args: Any) -> None:
    """Withdraw what `fill_in` set, where SGLang's own decisions since then exclude sharing.

    Runs inside the resolution, once model and attention backend have had their say.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    settled = resolving_view(server_args)
    if not active.is_on() or not is_ours(settled):
        return
    why = ""
    if settled.disable_radix_cache:
        why = "SGLang disables the radix cache for this model"
    elif not _fits(settled.page_size, active.config().engine.page_tokens):
        why = f"SGLang sets pages of {settled.page_size} tokens for this model or attention backend"
    elif _confuses_pictures(server_args):
        why = "SGLang has no prefix cache for pictures in models of its generic transformers backend"
    if why:
        logger.warning("cornplug: KV is not shared, only embeddings: %s", why)
        declare_resolution(
            server_args, "cornplug", enable_hierarchical_cache=False, hicache_storage_backend=None
        )


def _confuses_pictures(server_args: Any) -> bool:
    """Whether two prompts that differ in their pictures alone are one token stream to SGLang.

    Its models put values of the picture's hash for the placeholder tokens. The backend for models that
    it has no class for leaves the tokens as they are (0.5.23, `MultiModalMixin.pad_input_ids`), and
    SGLang then goes without a radix cache, but decides so only when it has set up ours.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import ModelImpl

    model = model_config_of(server_args)
    if not model.is_multimodal:
        return False
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    return bool(get_resolved_model_impl(model) == ModelImpl.TRANSFORMERS)


def is_ours(server_args: Any) -> bool:
    """Whether the storage behind this server's HiCache is ours."""
    if server_args.hicache_storage_backend != "dynamic":
        return False
    try:
        extra = json.loads(server_args.hicache_storage_backend_extra_config or "{}")
    except json.JSONDecodeError:  # "@FILE", or an error that SGLang itself names
        return False
    return isinstance(extra, dict) and extra.get("class_name") == BACKEND["class_name"]


def _excluded(server_args: Any) -> str:
    for field, plain, flag in _DEPLOYMENTS:
        if (value := getattr(server_args, field)) != plain:
            return f"{flag} {value}"
    if server_args.load_format in UNVERIFIABLE_FORMATS:
        return f"--load-format {server_args.load_format} does not read the checkpoint's safetensors"
    try:
        config = Checkpoint.open(server_args.model_path, server_args.revision).config
    except CheckpointError:
        return ""  # SGLang may yet download it; what cannot be identified later is not shared
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    hybrid = [name for name in _HYBRID_FIELDS if text.get(name)]
    hybrid += sorted({str(kind) for kind in text.get("layer_types") or ()} - {"full_attention"})
    return f"a hybrid model ({', '.join(hybrid)})" if hybrid else ""


def _no_room() -> str:
    """SGLang leaves a reserve of host memory (10 GiB) out of its host pools, and a server with HiCache
    does not start where nothing is left beside it: without us it would have."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host import base

    try:
        free, reserve = available_host_memory_bytes(), base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    except RuntimeError as e:  # no reading of the cgroup's limits; SGLang's own sizing would end on it
        return str(e)
    if free - reserve >= _LEAST_ROOM_BYTES:
        return ""
    gib = 1 << 30
    return f"{free / gib:.1f} GiB of host memory are free, {reserve / gib:.0f} of which HiCache leaves alone"


def _refuse_rivals(server_args: Any) -> None:
    for field, plain, flag in _RIVALS:
        if getattr(server_args, field) != plain:
            _conflict(flag, "which needs SGLang's hierarchical cache", f"Drop {flag}")
    backend = server_args.hicache_storage_backend
    if backend is not None and not is_ours(server_args):
        _conflict(f"--hicache-storage-backend {backend}", "which is a storage itself", "Drop one of the two")
    if str(server_args.hicache_storage_backend_extra_config or "").startswith("@"):
        _conflict(
            "--hicache-storage-backend-extra-config @FILE",
            "which adds to it",
            "Give it as a JSON object, or drop it",
        )


def _given_extra(server_args: Any) -> dict[str, Any]:
    text = server_args.hicache_storage_backend_extra_config or "{}"
    flag = "--hicache-storage-backend-extra-config"
    try:
        given = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(flag, f"no JSON: {e}", "Correct it, or drop it.") from e
    if not isinstance(given, dict):
        raise ConfigError(flag, "not a JSON object", "Correct it, or drop it.")
    return given


def compile_hash() -> None:
    """Have SGLang's page hash compiled, once for this machine.

    SGLang does it at the first call: left to itself, in the thread that answers lookups, so that
    for half a minute every request waits for its timeout. Raises ConfigError where it cannot.
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


def _check_page(page_size: int, page_tokens: int) -> None:
    if not _fits(page_size, page_tokens):
        _conflict(
            f"--page-size {page_size}",
            f"which shares pages of {page_tokens} tokens (--cornplug-page-tokens)",
            f"Choose a multiple of {LINK_TOKENS} that divides {page_tokens} or is a multiple of it",
        )


def _check_chunk(server_args: Any, page: int) -> None:
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % page:
        _conflict(
            f"--chunked-prefill-size {chunk}",
            f"which sets --page-size {page}, of which a chunk is a multiple",
            f"Choose a multiple of {page}, or give --page-size",
        )


def _fits(page_size: int, page_tokens: int) -> bool:
    divides = page_size % page_tokens == 0 or page_tokens % max(page_size, 1) == 0
    return page_size > 0 and page_size % LINK_TOKENS == 0 and divides


def _conflict(flag: str, why: str, remedy: str) -> None:
    raise ConfigError(flag, f"excludes --enable-cornplug, {why}", f"{remedy}, {_EMBEDDINGS_ONLY}.")


HOOKS: tuple[Hook, ...] = (Hook("sglang.srt.arg_groups.hicache_hook.handle_hicache", "before", settle),)
