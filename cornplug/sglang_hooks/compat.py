"""Everything that knows a version of SGLang: the tested range, and how its seams are hooked.

SGLang offers entry points and a hook registry for any of its functions. Each module of this
room lists the hooks that it needs (`HOOKS`); `hook_registry.py` registers them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from cornplug.engine_common.version_range import VersionRange

logger = logging.getLogger("sglang.cornplug")

SUPPORTED_VERSIONS: Final = VersionRange("SGLang", "sglang", (0, 5, 23), (0, 5, 24))

VALIDATED_FAMILIES: Final = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Families whose images are shared here: `tests/integration/test_families.py` has compared what SGLang
makes of them with what the encoder service makes. Of the others SGLang 0.5.23 computes Gemma 3's SigLIP
with CLIP's activation, does not load LLaVA-1.5 as it is published, and leaves LLaVA-NeXT,
LLaVA-OneVision and InternVL (-hf) to its generic backend, which has no call that we could stand in for."""

EPOCHS: Final[Mapping[str, int]] = {}
"""`model_type` -> how often a release in the tested range has mended what SGLang computes for that
family. A mended one computes other values from the same checkpoint: an epoch other than 0 is part of
the key, so that a server before the mending and one after it share nothing."""


class Hook(NamedTuple):
    """One seam. `function` as `sglang.srt.plugins.hook_registry.HookType` says:

    before(*args, **kwargs) -> (args, kwargs) or None; after(result, *args, **kwargs) -> result
    or None; around(original, *args, **kwargs) -> result; replace: a function or a class.
    """

    target: str
    """Dotted path of a function, method or class of SGLang."""
    kind: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    reads: tuple[str, ...] = ()
    """Parameters of the target that `function` reads by name (`arguments`)."""


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def arguments(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of `target` gives for each of its parameters, defaults included.

    So that a hook follows SGLang's signature, which changes from release to release, and does not
    repeat it.
    """
    bound = _signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
