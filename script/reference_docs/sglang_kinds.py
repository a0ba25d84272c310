"""docs/sglang-kinds.md, from the exclusions of cornplug/sglang_hooks/kv/."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cornplug.codec import ITEM_BYTES
from cornplug.kv_page import QUANTISED
from cornplug.sglang_hooks.drafts.draft_exclusions import (
    BESIDE_DRAFT,
    DRAFT_SETTINGS,
    DRAFT_TREES,
    DRAFTS,
    TREES,
)
from cornplug.sglang_hooks.excluded_flag import ExcludedFlag
from cornplug.sglang_hooks.kv.exclusions import (
    BESIDE_WINDOWS,
    DEPLOYMENTS,
    HYBRID_FIELDS,
    NO_PAGE_OF_PAIR,
    WINDOWS,
)
from cornplug.sglang_hooks.kv.hicache_config import RIVALS
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS
from devkit.sglang_kinds import KINDS, ServerKind

from .markdown import notice, table

_INTRO: Final = """# Kinds of SGLang servers: shared, or why not

{notice}

## KV is shared

Tests resolve the settings of a server with each of these flags (`tests/sglang_hooks/test_kinds.py`).
`tests/integration/test_sglang_ranks.py` runs servers of several ranks on a CPU, and
`tests/integration/test_sglang_kinds.py` those with several tokenizers, an fp8 KV cache,
n-grams, a smaller model, EAGLE, and those of models whose windows lie in one pool.

{shared}

Sliding windows in a pool beside full attention (GPT-OSS, Mellum 2) are shared with other SGLang servers, in
pages of less than 64 tokens with those of the same `--page-size`
(`tests/integration/test_sglang_hybrids.py`).

## KV is not shared: the server runs with the settings of a stock one

Its log names the reason. Images can be shared all the same.

{excluded}

Tests compare the settings of such servers with those of stock ones (`tests/sglang_hooks/test_kinds.py`,
`tests/sglang_hooks/test_flags.py`).

## The start fails, with an error that names both flags

These own the KV's host side, as cornplug does. With `CORNPLUG_ENGINE_SHARE_KV=false` the server
starts and shares embeddings.

{rivals}
"""


def page() -> str:
    """The text of docs/sglang-kinds.md."""
    excluded = [(_flag(each), each.why) for each in DEPLOYMENTS]
    flag, _, why = NO_PAGE_OF_PAIR.partition(" (")
    excluded += [
        (f"`{flag}`", why.removesuffix(")")),
        (
            "two of `--pp-size`, `--disaggregation-mode`, `--speculative-algorithm`",
            "no test runs them together",
        ),
    ]
    excluded += [
        ("`--load-format`", f"shared are {_words(sorted(READS_SAFETENSORS))}: the others read other files"),
        ("`--speculative-algorithm`", DRAFTS),
        ("`--speculative-algorithm NGRAM`", TREES),
        *((f"`EAGLE`, `STANDALONE` with `{each.flag}`", each.why) for each in DRAFT_SETTINGS),
        ("`EAGLE`, `STANDALONE` with `--speculative-eagle-topk`", DRAFT_TREES),
        *(("`EAGLE`, `STANDALONE`", why) for why in BESIDE_DRAFT.values()),
        (
            "`--kv-cache-dtype`",
            f"shared are {_words(ITEM_BYTES)} and, without scales in the checkpoint and not of MLA, "
            f"{_words(sorted(QUANTISED))}: the others keep scales beside the values",
        ),
        ("some models with sliding windows", WINDOWS),
        ("`--speculative-algorithm`, fp8 KV", BESIDE_WINDOWS),
        ("other hybrid models: chunks, states, sparse attention", f"{_words(HYBRID_FIELDS)} in config.json"),
        ("models of SGLang's generic transformers backend", "SGLang has no prefix cache for their images"),
    ]
    return _INTRO.format(
        notice=notice("`cornplug/sglang_hooks/kv/exclusions.py`"),
        shared=table(("kind", "flags", "remark"), [_row(kind) for kind in KINDS if not kind.excluded_by]),
        excluded=table(("setting or model", "why"), excluded),
        rivals=table(("flag",), [(f"`{flag}`",) for _, _, flag in RIVALS]),
    )


def _flag(each: ExcludedFlag) -> str:
    """A flag and, where several values of it are shared, which are not."""
    return f"`{each.flag}`" + (f" but {_words(map(str, each.also))}" if each.also else "")


def _row(kind: ServerKind) -> tuple[str, str, str]:
    return kind.name, f"`{' '.join(kind.args)}`", kind.remark


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
