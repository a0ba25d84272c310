"""The functions of SGLang that cornplug hooks or overrides have the parameters with which it was tested.

`tests/golden/sglang_seams.txt` lists them, and this names a seam that moved, or that SGLang no longer has.
`RECORD_SGLANG_SEAMS=1 pytest tests/sglang_hooks/test_seams.py` writes the list anew.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from cornplug.sglang_hooks import plugin
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage

GOLDEN = Path(__file__).parents[1] / "golden" / "sglang_seams.txt"


def parameters(function: Any) -> str:
    """Names, kinds and presence of defaults; annotations and the defaults' values do not count."""
    shown = []
    for one in inspect.signature(inspect.unwrap(function)).parameters.values():
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else "=..."
        shown.append(f"{stars}{one.name}{default}")
    return ", ".join(shown)


def seams() -> Iterator[str]:
    for hook in plugin.hooks_of(plugin.ALL):
        try:
            yield f"{hook.target}({parameters(pkgutil.resolve_name(hook.target))})"
        except (AttributeError, ImportError):
            yield f"{hook.target} is gone"
    ours = [each for each in CornplugStorage.__mro__ if each.__module__.startswith("cornplug.")]
    for name, method in (item for each in ours for item in vars(each).items()):
        theirs = getattr(HiCacheStorage, name, None)
        if not name.startswith("_") and inspect.isfunction(method) and theirs is not None:
            yield f"HiCacheStorage.{name}({parameters(theirs)})"


def test_seams_of_this_release_are_as_recorded() -> None:
    found = set(seams())
    if os.environ.get("RECORD_SGLANG_SEAMS"):
        GOLDEN.write_text("".join(f"{seam}\n" for seam in sorted(found)))
    recorded = set(GOLDEN.read_text().splitlines())
    assert {"new": found - recorded, "gone": recorded - found} == {"new": set(), "gone": set()}
