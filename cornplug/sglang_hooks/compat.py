"""Facts of one SGLang version: the tested range, the validated families, and how functions are hooked.

SGLang provides entry points, and a hook registry for all of its functions. Each module of this package lists
the hooks that it needs (`HOOKS`), and `hook_registry.py` registers them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from cornplug.checkpoints.validated_families import validated
from cornplug.engine_common.version_range import VersionRange

logger = logging.getLogger("sglang.cornplug")

SUPPORTED_VERSIONS: Final = VersionRange("SGLang", "sglang", (0, 5, 23), (0, 5, 24))
"""Excludes 0.5.22, although its hooked functions have the same parameters: its HiCache copies a page to host
memory without waiting for the forward pass that may still write the page (`write_fence_stream` was added in
0.5.23). Such a page would be wrong in every engine that reads it from the store."""

GENERIC_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {"glm4v": ("pixel_values", "image_grid_thw")}
"""Validated families that the service computes with transformers' own class (`EngineModel`)."""

EPOCHS: Final[Mapping[str, int]] = {}
"""`model_type` -> number of releases in the tested range that changed the results of that family, for example
by a bug fix. An epoch other than 0 is part of the key, so that servers before and after the change do not
share."""


def validated_families(dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the families for which the installed SGLang shares images with this dtype.

    `tests/integration/test_families.py` has compared this release's embeddings with those of the encoder
    service. Among the others, SGLang 0.5.23 computes Gemma 3's SigLIP with CLIP's activation, cannot load
    LLaVA-1.5 as published, and runs LLaVA-NeXT, LLaVA-OneVision and InternVL (-hf) with its generic backend,
    which has no function that could be hooked.

    The kinds "own image", "own video" and "own audio" are for embeddings that are shared only among SGLang
    servers. Their keys depend on the tensors that enter the tower (`tests/integration/test_own_towers.py`).
    """
    return validated("sglang", SUPPORTED_VERSIONS.installed(), dtype, kind)


class Hook(NamedTuple):
    """Hook on a function of SGLang. The signature depends on `sglang.srt.plugins.hook_registry.HookType`:

    before(*args, **kwargs) -> (args, kwargs) or None; after(result, *args, **kwargs) -> result or None;
    around(original, *args, **kwargs) -> result; replace: a function or a class.
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
    """Map the parameters of a call of `target` to its arguments, including defaults.

    Hooks read arguments by name, because SGLang's signatures change between releases.
    """
    bound = _signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
