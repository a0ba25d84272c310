"""Settings of speculative decoding that exclude KV sharing.

`kv/exclusions.py` uses them to report why a server does not share.
"""

from __future__ import annotations

from typing import Any, Final

from cornplug.kv_page import QUANTISED
from cornplug.sglang_hooks.excluded_flag import ExcludedFlag
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS

_WINDOWED: Final = "not tested: a draft model that attends to a window"
DRAFT_SETTINGS: Final = (
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
    ExcludedFlag("speculative_draft_window_size", None, "--speculative-draft-window-size", _WINDOWED),
    ExcludedFlag("speculative_draft_sink_size", None, "--speculative-draft-sink-size", _WINDOWED),
)
"""Settings that exclude KV sharing with a draft model (`_WITH_DRAFT_KV`)."""
DRAFTS: Final = "not tested. EAGLE, STANDALONE and NGRAM can be shared"
"""Reason for values of `--speculative-algorithm` other than `_DRAFTERS`."""
_WITH_DRAFT_KV: Final = frozenset({"EAGLE", "STANDALONE"})
_DRAFTERS: Final = frozenset({"", "NGRAM", *_WITH_DRAFT_KV})
DRAFT_TREES: Final = "not tested: drafts with more than one branch. Set --speculative-eagle-topk 1"
"""Reason for a draft model that proposes several tokens per position."""
BESIDE_DRAFT: Final = {
    "mla": "not tested: a draft model with an MLA model",
    "images": "not tested: a draft model with a multimodal model",
    "fp8": "not tested: a draft model with an fp8 KV cache",
}
"""Reasons for some combinations of model and draft model."""
TREES: Final = (
    "with more than one branch, SGLang needs pages of one token, or flashinfer: set "
    "--speculative-ngram-max-bfs-breadth 1, or --attention-backend flashinfer"
)
"""Reason for NGRAM with its default breadth and other attention backends."""


def drafter(settings: Any) -> str:
    """Reason why KV is not shared with these settings of speculative decoding, or ""."""
    algorithm = str(settings.speculative_algorithm or "").upper()
    if algorithm not in _DRAFTERS:
        return f"--speculative-algorithm {algorithm} ({DRAFTS})"
    if algorithm not in _WITH_DRAFT_KV:
        return ""
    for each in DRAFT_SETTINGS:
        if (value := getattr(settings, each.field)) != each.plain:
            return f"{each.flag} {value} ({each.why})"
    if (settings.speculative_eagle_topk or 1) > 1:
        return f"--speculative-eagle-topk {settings.speculative_eagle_topk} ({DRAFT_TREES})"
    if (read := settings.speculative_draft_load_format) not in {None, *READS_SAFETENSORS}:
        return f"--speculative-draft-load-format {read} does not read the checkpoint's safetensors"
    return ""


def branches(settings: Any) -> str:
    """Reason why a server with a draft would not start with pages of several tokens, or ""."""
    if str(settings.speculative_algorithm or "").upper() != "NGRAM":
        return ""
    if settings.speculative_ngram_max_bfs_breadth <= 1 or settings.attention_backend == "flashinfer":
        return ""
    return f"--speculative-algorithm NGRAM ({TREES})"


def beside_draft(server_args: Any, settled: Any) -> str:
    """Reason why KV of this model is not shared with a draft model, or "" if it is or if there is no
    draft."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    algorithm = str(settled.speculative_algorithm or "").upper()
    if algorithm not in _WITH_DRAFT_KV:
        return ""
    model = model_config_of(server_args)
    is_so = {
        "mla": model.attention_arch != AttentionArch.MHA,
        "images": model.is_multimodal,
        "fp8": settled.kv_cache_dtype in QUANTISED,
    }
    why = next((BESIDE_DRAFT[kind] for kind, is_this in is_so.items() if is_this), "")
    return f"--speculative-algorithm {algorithm} ({why})" if why else ""
