"""docs/sglang-kinds.md, from the exclusions of cornplug/sglang_hooks/kv/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from cornplug.codec import ITEM_BYTES
from cornplug.kv_page import QUANTISED_FORMATS
from cornplug.sglang_hooks.kv.exclusions import (
    DEPLOYMENT_FLAGS,
    DRAFT_ALGORITHM_REASON,
    DRAFT_BRANCHES_REASON,
    DRAFT_FLAGS,
    HYBRID_FIELDS,
    NGRAM_BRANCHES_REASON,
    NO_PAGE_SIZE_REASON,
    WINDOWS_REASON,
    WITH_DRAFT_REASONS,
    WITH_WINDOWS_REASON,
    ExcludedFlag,
)
from cornplug.sglang_hooks.kv.hicache_config import CONFLICTING_FLAGS
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS
from devkit.sglang_kinds import KINDS

from .markdown import notice

_INTRO: Final = """# SGLang server flags and KV sharing

This page lists which SGLang flags and models work with KV sharing. [Limits](limits.md#kv-cache-by-model)
compares both engines.

{notice}

## KV is shared

{shared}

Models with sliding windows in a separate pool (GPT-OSS, Mellum 2) share KV with other SGLang servers. If
`--page-size` is below 64, the servers need the same `--page-size`.

## KV is not shared

With these settings and models the server keeps its stock KV configuration, but can share embeddings.

{excluded}

With a draft (`EAGLE`, `STANDALONE`), these settings and models are not shared:

{drafts}

## The server does not start

{rivals} also control the host side of the KV cache, so they stop the server with an error. To share only
embeddings, set `CORNPLUG_ENGINE_SHARE_KV=false`.
"""
_NOT_TESTED: Final = "not tested"
_BESIDE: Final = {"mla": "MLA models", "images": "multimodal models", "fp8": "an fp8 KV cache"}
"""Key of `WITH_DRAFT_REASONS` -> its name on the page."""


def page() -> str:
    """The text of docs/sglang-kinds.md."""
    excluded = [(_flag(each), each.why) for each in DEPLOYMENT_FLAGS]
    flag, _, why = NO_PAGE_SIZE_REASON.partition(" (")
    excluded += [
        (f"`{flag}`", why.removesuffix(")")),
        (
            "two of `--pp-size`, `--disaggregation-mode`, `--speculative-algorithm`",
            "combinations are not tested",
        ),
    ]
    excluded += [
        (
            "`--load-format`",
            f"only {_words(sorted(READS_SAFETENSORS))} are shared",
        ),
        ("`--speculative-algorithm`", DRAFT_ALGORITHM_REASON),
        ("`--speculative-algorithm NGRAM`", NGRAM_BRANCHES_REASON),
        (
            "`--kv-cache-dtype`",
            f"only {_words(ITEM_BYTES)} are shared and, without scales in the checkpoint and without MLA, "
            f"{_words(sorted(QUANTISED_FORMATS))}",
        ),
        ("some models with sliding windows", WINDOWS_REASON),
        ("`--speculative-algorithm` or an fp8 KV cache, with sliding windows", WITH_WINDOWS_REASON),
        (
            "other hybrid models (chunked or sparse attention, states)",
            f"{_words(HYBRID_FIELDS)} in config.json",
        ),
        ("models in SGLang's generic transformers backend", "SGLang has no prefix cache for their images"),
    ]
    drafts = [
        *((f"`{each.flag}`", each.why) for each in DRAFT_FLAGS),
        ("`--speculative-eagle-topk`", DRAFT_BRANCHES_REASON),
        *((kind, _NOT_TESTED) for kind in _BESIDE.values()),
    ]
    assert _BESIDE.keys() == WITH_DRAFT_REASONS.keys()
    shared: dict[str, list[str]] = {}
    for kind in KINDS:
        if not kind.excluded_by:
            shared.setdefault(kind.remark, []).append(f"`{' '.join(kind.args)}`")
    return _INTRO.format(
        notice=notice("`cornplug/sglang_hooks/kv/exclusions.py`"),
        shared=_list((", ".join(flags), remark) for remark, flags in shared.items()),
        excluded=_list(_merged(excluded)),
        drafts=_list(_merged(drafts)),
        rivals=_words(flag for _, _, flag in CONFLICTING_FLAGS),
    )


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {left}" + (f": {right}" if right else "") for left, right in rows)


def _merged(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Rows of (setting, reason), with one row for settings that have the same reason."""
    settings: dict[str, list[str]] = {}
    for setting, reason in rows:
        settings.setdefault(reason, []).append(setting)
    return ((", ".join(same), reason) for reason, same in settings.items())


def _flag(each: ExcludedFlag) -> str:
    """A flag and, where several values of it are shared, which are not."""
    return f"`{each.flag}`" + (f" but {_words(map(str, each.allowed))}" if each.allowed else "")


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
