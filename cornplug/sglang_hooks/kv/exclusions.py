"""Settings, models, draft models and deployments that exclude KV sharing.

`hicache_config.declare_settings` checks these exclusions at the end of SGLang's own resolution of its
settings. At this time, cornplug has not changed any setting. A server that cannot share therefore runs with
exactly its stock settings. `late_exclusions.py` checks properties of the loaded model before the host pools
are allocated.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.codec import ITEM_BYTES
from cornplug.engine_common.model_identity import quantised_kv_field
from cornplug.errors import CheckpointError
from cornplug.identity import LINK_TOKENS
from cornplug.kv_page import QUANTISED_FORMATS
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS, runs_generic_backend

_MIN_HOST_POOL_BYTES: Final = 1 << 30
"""Minimum total memory of the host pools. Smaller pools would share little, and loading the model may need
this memory."""
_PARTIAL_PAGES: Final = "each rank holds a part of a page that is not a range of heads"
_NEEDS_GPU: Final = "not tested: SGLang 0.5.23 needs a GPU for it"
_REJECTED_BY_SGLANG: Final = "SGLang does not start with HiCache and this flag"
WINDOWS_REASON: Final = (
    "SGLang keeps KV of their sliding windows in a pool without pages, or with a different number of KV "
    "heads. With --disable-hybrid-swa-memory (default for Gemma 2 and 3, OLMo 3, EXAONE 4) their KV is "
    "shared, unless the model is multimodal"
)
"""Reason why some models with sliding windows do not share KV."""
WITH_WINDOWS_REASON: Final = "not tested: with sliding windows in a separate pool"
"""Reason why models with sliding windows exclude some settings that are supported for other models."""
NO_PAGE_SIZE_REASON: Final = (
    "--disaggregation-mode prefill without --page-size (SGLang transfers KV only between servers with the "
    "same page size: set `--page-size 64` on prefill and decode servers)"
)
"""Reason why a prefill server needs an explicit page size. A decode server fails at its first request if its
prefill server has another page size."""
# Fields of a text config that indicate per-token state other than K and V of full attention.
HYBRID_FIELDS: Final = (
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
_KV_DTYPES: Final = frozenset({"auto", "bf16", "bfloat16"})
"""Values of `--kv-cache-dtype` with which the cache has a dtype in `codec.ITEM_BYTES`. All other values
quantise the cache: values in `kv_page.QUANTISED_FORMATS` by a cast, and other values with separate scales."""
_WINDOWED_DRAFT: Final = "not tested: a draft model that attends to a window"
DRAFT_ALGORITHM_REASON: Final = "not tested. EAGLE, STANDALONE and NGRAM can be shared"
"""Reason why values of `--speculative-algorithm` other than `_DRAFTERS` exclude sharing."""
_WITH_DRAFT_KV: Final = frozenset({"EAGLE", "STANDALONE"})
_DRAFTERS: Final = frozenset({"", "NGRAM", *_WITH_DRAFT_KV})
DRAFT_BRANCHES_REASON: Final = "not tested: drafts with more than one branch. Set --speculative-eagle-topk 1"
"""Reason why a draft model that proposes several tokens per position excludes sharing."""
WITH_DRAFT_REASONS: Final = {
    "mla": "not tested: a draft model with an MLA model",
    "images": "not tested: a draft model with a multimodal model",
    "fp8": "not tested: a draft model with an fp8 KV cache",
}
"""Reasons why some combinations of model and draft model exclude sharing."""
NGRAM_BRANCHES_REASON: Final = (
    "with more than one branch, SGLang needs pages of one token, or flashinfer: set "
    "--speculative-ngram-max-bfs-breadth 1, or --attention-backend flashinfer"
)
"""Reason why NGRAM with its default breadth excludes sharing with attention backends other than
flashinfer."""


class ExcludedFlag(NamedTuple):
    """An SGLang setting that excludes KV sharing."""

    field: str
    default: object
    """Default value of the field, which does not exclude sharing."""
    flag: str
    why: str
    allowed: tuple[object, ...] = ()
    """Other values that do not exclude sharing."""


DEPLOYMENT_FLAGS: Final = (
    ExcludedFlag("nnodes", 1, "--nnodes", "the store is local to one host"),
    ExcludedFlag("dcp_size", 1, "--dcp-size", _PARTIAL_PAGES),
    ExcludedFlag("attn_cp_size", 1, "--attn-cp-size", _PARTIAL_PAGES),
    ExcludedFlag("attn_dp_size", 1, "--attn-dp-size", _NEEDS_GPU),
    ExcludedFlag(
        "disaggregation_mode",
        "null",
        "--disaggregation-mode",
        "a decode server receives its KV from prefill servers by SGLang's own transfer, without content keys",
        allowed=("prefill",),
    ),
    ExcludedFlag(
        "enable_pd_role_switch",
        False,
        "--enable-pd-role-switch",
        "the server can become a decode server, which receives its KV from prefill servers",
    ),
    ExcludedFlag(
        "disaggregation_decode_allocation_policy",
        "early",
        "--disaggregation-decode-allocation-policy",
        "with `prefill_complete`, SGLang does not accept a storage for HiCache",
    ),
    ExcludedFlag("dllm_algorithm", None, "--dllm-algorithm", "KV of a block changes after it is written"),
    ExcludedFlag("enable_prefill_cp", False, "--enable-prefill-cp", _PARTIAL_PAGES),
    ExcludedFlag("encoder_only", False, "--encoder-only", "the server has no KV"),
    ExcludedFlag("is_embedding", False, "--is-embedding", "not tested: each request is a single prefill"),
    ExcludedFlag("enable_dp_attention", False, "--enable-dp-attention", _NEEDS_GPU),
    ExcludedFlag("use_ray", False, "--use-ray", "its actors do not inherit cornplug's settings"),
    ExcludedFlag("enable_kv_cache_sharding", False, "--enable-kv-cache-sharding", _REJECTED_BY_SGLANG),
    ExcludedFlag(
        "enable_int8_mamba_checkpoint", False, "--enable-int8-mamba-checkpoint", _REJECTED_BY_SGLANG
    ),
    ExcludedFlag("enable_nvidia_megakernel", False, "--enable-nvidia-megakernel", _REJECTED_BY_SGLANG),
    ExcludedFlag("enable_amd_monokernel", False, "--enable-amd-monokernel", _REJECTED_BY_SGLANG),
)


def exclusion_reason(server_args: Any, page_tokens: int) -> str:
    """Return the reason why this server's KV cannot be shared, or "" if no exclusion applies.

    Args:
        server_args: SGLang's settings, either unresolved or resolved up to the HiCache step.
        page_tokens: number of tokens in a store page.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    settled = resolving_view(server_args)
    return (
        deployment_exclusion(settled)
        or ngram_exclusion(settled)
        or _checkpoint_exclusion(server_args, settled)
        or _window_exclusion(server_args, settled)
        or draft_model_exclusion(server_args, settled)
        or _kv_dtype_exclusion(server_args, settled)
        or _cache_exclusion(server_args, settled, page_tokens)
        or _image_exclusion(server_args)
        or ("" if settled.enable_hierarchical_cache else _memory_exclusion())
    )


def page_size_fits(page_size: int, page_tokens: int) -> bool:
    """Return whether SGLang pages of this size can be converted to store pages.

    One of the two page sizes must be a multiple of the other.
    """
    divides = page_size % page_tokens == 0 or page_tokens % max(page_size, 1) == 0
    return page_size > 0 and page_size % LINK_TOKENS == 0 and divides


def choose_page_size(settled: Any, page_tokens: int) -> int:
    """Return SGLang's page size for servers whose operator and model set none, or 0 if no size fits.

    A prefill chunk must consist of complete pages, so the result is the largest page size that divides a
    chunk.
    """
    chunk = settled.chunked_prefill_size
    for size in (page_tokens, *(n for n in (64, 32, LINK_TOKENS) if n < page_tokens)):
        if page_size_fits(size, page_tokens) and (chunk is None or chunk <= 0 or chunk % size == 0):
            return size
    return 0


def is_default_page_size(server_args: Any) -> bool:
    """Return whether the page size is SGLang's default. If so, neither operator nor model has set it."""
    for source, declared in reversed(getattr(server_args, "_resolved_overrides", None) or ()):
        if "page_size" in declared:
            return bool(source == "_page_size_default")
    return server_args.page_size is None


def deployment_exclusion(settings: Any) -> str:
    """Return the reason why the deployment excludes sharing, with the flag and its value, or "" if it can
    share."""
    for each in DEPLOYMENT_FLAGS:
        if (value := getattr(settings, each.field)) not in (each.default, *each.allowed):
            return f"{each.flag} {value} ({each.why})"
    if why := _combination_exclusion(settings) or drafting_exclusion(settings):
        return why
    if settings.load_format not in READS_SAFETENSORS:
        return f"--load-format {settings.load_format} does not read only the checkpoint's safetensors"
    return ""


def _combination_exclusion(settings: Any) -> str:
    """Return the reason why a combination of certain flags excludes sharing, or "" if at most one of these
    flags is set.

    Each of these flags alone does not exclude sharing.
    """
    ways = {
        "--pp-size": settings.pp_size > 1,
        "--disaggregation-mode": settings.disaggregation_mode != "null",
        "--speculative-algorithm": settings.speculative_algorithm is not None,
    }
    chosen = [flag for flag, is_chosen in ways.items() if is_chosen]
    return f"{' with '.join(chosen)} (this combination is not tested)" if len(chosen) > 1 else ""


def _checkpoint_exclusion(server_args: Any, settled: Any) -> str:
    try:
        config = Checkpoint.open(settled.model_path, settled.revision).config
    except CheckpointError:
        return ""  # Identification fails later, so KV is not shared.
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    hybrid = [name for name in HYBRID_FIELDS if text.get(name)]
    kinds = {str(kind) for kind in text.get("layer_types") or ()} - {"full_attention"}
    # With a single pool, layers with windows also keep K and V of every token. Multimodal models with windows
    # are excluded. In some of these models (Gemma 3), the tokens of an image attend to each other, but only
    # some attention backends support this.
    in_one = settled.disable_hybrid_swa_memory and kinds and not _is_multimodal(server_args)
    if in_one or (kinds == {"sliding_attention"} and has_separate_window_pool(server_args)):
        kinds.discard("sliding_attention")
    hybrid += sorted(kinds)
    return f"a hybrid model ({', '.join(hybrid)})" if hybrid else ""


def _is_multimodal(server_args: Any) -> bool:
    from sglang.srt.arg_groups.overrides import model_config_of

    return bool(model_config_of(server_args).is_multimodal)


def has_separate_window_pool(server_args: Any) -> bool:
    """Return whether SGLang keeps the layers with sliding windows in a separate pool that can be shared.

    Multimodal models are excluded, because with bidirectional attention KV depends on later tokens.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    if not model.is_hybrid_swa or model.is_multimodal or not (model.sliding_window_size or 0) > 0:
        return False
    full, windows = model.full_attention_layer_ids or (), model.swa_attention_layer_ids or ()
    whole = full and windows and len(full) + len(windows) == model.num_hidden_layers
    return bool(whole) and model.get_num_kv_heads(1) == model.get_swa_num_kv_heads(1)


def _window_exclusion(server_args: Any, settled: Any) -> str:
    """Return the reason why KV of a model with a separate window pool is not shared, or "" if it is
    shared."""
    from sglang.srt.arg_groups.overrides import model_config_of

    if not model_config_of(server_args).is_hybrid_swa:
        return ""
    if not has_separate_window_pool(server_args):
        return f"a hybrid model: {WINDOWS_REASON}"
    if algorithm := settled.speculative_algorithm:
        return f"--speculative-algorithm {algorithm} ({WITH_WINDOWS_REASON})"
    if settled.kv_cache_dtype in QUANTISED_FORMATS:
        return f"--kv-cache-dtype {settled.kv_cache_dtype} ({WITH_WINDOWS_REASON})"
    return ""


def _kv_dtype_exclusion(server_args: Any, settled: Any) -> str:
    from sglang.srt.arg_groups.overrides import model_config_of

    dtype = settled.kv_cache_dtype
    if dtype not in _KV_DTYPES | QUANTISED_FORMATS:
        shared = ", ".join((*ITEM_BYTES, *sorted(QUANTISED_FORMATS)))
        return f"--kv-cache-dtype {dtype}: cornplug shares only {shared}"
    if dtype in ("bf16", "bfloat16"):
        return ""
    model = model_config_of(server_args)
    if field := quantised_kv_field(model.hf_config):
        return f"the checkpoint has a quantised KV cache ({field})"
    if dtype in QUANTISED_FORMATS:
        return _fp8_exclusion(dtype, model)
    name = str(model.dtype).removeprefix("torch.")
    return "" if name in ITEM_BYTES else f"KV of dtype {name}: cornplug shares only {', '.join(ITEM_BYTES)}"


def _fp8_exclusion(dtype: str, model: Any) -> str:
    from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz
    from sglang.srt.configs.model_config import AttentionArch

    if model.attention_arch != AttentionArch.MHA:
        return f"--kv-cache-dtype {dtype} with MLA"
    if is_fp8_fnuz():
        return f"--kv-cache-dtype {dtype}: AMD's fnuz variant of this dtype has different values"
    return ""


def _cache_exclusion(server_args: Any, settled: Any, page_tokens: int) -> str:
    from sglang.srt.environ import envs

    if settled.disable_radix_cache:
        return "SGLang disables the radix cache for this model"
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        return "SGLANG_RADIX_FORCE_MISS is set, so SGLang does not use its prefix cache"
    if is_default_page_size(server_args):
        if settled.disaggregation_mode != "null":
            return NO_PAGE_SIZE_REASON
        if not choose_page_size(settled, page_tokens):
            return (
                f"--chunked-prefill-size {settled.chunked_prefill_size} is not a multiple of a page size of "
                f"at least {LINK_TOKENS} tokens"
            )
    elif not page_size_fits(settled.page_size, page_tokens):
        return f"SGLang sets a page size of {settled.page_size} tokens for this model or attention backend"
    return ""


def _image_exclusion(server_args: Any) -> str:
    """Return why SGLang cannot distinguish prompts that differ only in their images, or "" if it can.

    SGLang's own models replace placeholder tokens by values of the image's hash. The generic backend does not
    (0.5.23, `MultiModalMixin.pad_input_ids`). With the generic backend, SGLang disables the radix cache, but
    only after it has set up cornplug's storage.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    if not model.is_multimodal or not runs_generic_backend(model):
        return ""
    return "SGLang has no prefix cache for images of models in its generic transformers backend"


def _memory_exclusion() -> str:
    """Return the reason why host memory is too small for HiCache, or "" if it is large enough.

    SGLang does not use a reserve of host memory (10 GiB) for its host pools. If no memory is left after the
    reserve, a server with HiCache does not start, but a server without HiCache does.
    """
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host import base

    try:
        free, reserve = available_host_memory_bytes(), base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    except RuntimeError as e:  # SGLang cannot size its pools without the cgroup's limits.
        return str(e)
    if free - reserve >= _MIN_HOST_POOL_BYTES:
        return ""
    gib = 1 << 30
    return (
        f"{free / gib:.1f} GiB of host memory are free, and HiCache reserves {reserve / gib:.0f} GiB of that "
        "for the host"
    )


DRAFT_FLAGS: Final = (
    ExcludedFlag(
        "enable_multi_layer_eagle", False, "--enable-multi-layer-eagle", "not tested: several draft models"
    ),
    ExcludedFlag(
        "decrypted_draft_config_file",
        None,
        "--decrypted-draft-config-file",
        "the decrypted config is not part of the key",
    ),
    ExcludedFlag(
        "speculative_adaptive",
        False,
        "--speculative-adaptive",
        "the draft's KV has gaps, because a busy server skips drafting",
    ),
    ExcludedFlag("speculative_draft_window_size", None, "--speculative-draft-window-size", _WINDOWED_DRAFT),
    ExcludedFlag("speculative_draft_sink_size", None, "--speculative-draft-sink-size", _WINDOWED_DRAFT),
)
"""Settings that exclude KV sharing with a draft model (`_WITH_DRAFT_KV`)."""


def drafting_exclusion(settings: Any) -> str:
    """Return why KV is not shared with these settings of speculative decoding, or "" if it is shared."""
    algorithm = str(settings.speculative_algorithm or "").upper()
    if algorithm not in _DRAFTERS:
        return f"--speculative-algorithm {algorithm} ({DRAFT_ALGORITHM_REASON})"
    if algorithm not in _WITH_DRAFT_KV:
        return ""
    for each in DRAFT_FLAGS:
        if (value := getattr(settings, each.field)) != each.default:
            return f"{each.flag} {value} ({each.why})"
    if (settings.speculative_eagle_topk or 1) > 1:
        return f"--speculative-eagle-topk {settings.speculative_eagle_topk} ({DRAFT_BRANCHES_REASON})"
    if (read := settings.speculative_draft_load_format) not in {None, *READS_SAFETENSORS}:
        return f"--speculative-draft-load-format {read} does not read the checkpoint's safetensors"
    return ""


def ngram_exclusion(settings: Any) -> str:
    """Return why a server with NGRAM drafts would not start with pages of several tokens, or "" if it would
    start."""
    if str(settings.speculative_algorithm or "").upper() != "NGRAM":
        return ""
    if settings.speculative_ngram_max_bfs_breadth <= 1 or settings.attention_backend == "flashinfer":
        return ""
    return f"--speculative-algorithm NGRAM ({NGRAM_BRANCHES_REASON})"


def draft_model_exclusion(server_args: Any, settled: Any) -> str:
    """Return the reason why this model's KV is not shared if the server has a draft model.

    Returns "" if KV is shared, or if there is no draft model.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    algorithm = str(settled.speculative_algorithm or "").upper()
    if algorithm not in _WITH_DRAFT_KV:
        return ""
    model = model_config_of(server_args)
    is_so = {
        "mla": model.attention_arch != AttentionArch.MHA,
        "images": model.is_multimodal,
        "fp8": settled.kv_cache_dtype in QUANTISED_FORMATS,
    }
    why = next((WITH_DRAFT_REASONS[kind] for kind, is_this in is_so.items() if is_this), "")
    return f"--speculative-algorithm {algorithm} ({why})" if why else ""
