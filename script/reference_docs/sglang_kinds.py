"""docs/sglang-kinds.md, from the exclusions of cornplug/sglang_hooks/kv/."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cornplug.codec import ITEM_BYTES
from cornplug.sglang_hooks.kv.exclusions import DEPLOYMENTS, HYBRID_FIELDS, NO_PAGE_OF_PAIR, ExcludedFlag
from cornplug.sglang_hooks.kv.hicache_config import RIVALS
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS
from devkit.sglang_kinds import KINDS, ServerKind

from .markdown import notice, table

_INTRO: Final = """# Kinds of SGLang servers: shared, or why not

{notice}

## KV is shared

Tests resolve the settings of a server with each of these flags (`tests/sglang_hooks/test_kinds.py`).

{shared}

Sliding windows in a pool beside full attention (GPT-OSS, Mellum 2) are shared with other SGLang servers
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
        ("`--kv-cache-dtype`", f"shared are {_words(ITEM_BYTES)}: the others quantise"),
        ("hybrid models: chunks, states, sparse attention", f"{_words(HYBRID_FIELDS)} in config.json"),
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
