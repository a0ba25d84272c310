"""Facts of one SGLang version: the tested range, the validated families, and how functions are hooked.

SGLang offers entry points and a hook registry for any of its functions. Each module of this
room lists the hooks that it needs (`HOOKS`); `hook_registry.py` registers them.
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
"""Not 0.5.22, though its hooked functions have the same parameters: its HiCache copies a page to host memory
without waiting for the forward that may still write the page (`write_fence_stream` came with 0.5.23). Such a
page would be wrong in every engine that reads it from the store."""

GENERIC_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {"glm4v": ("pixel_values", "image_grid_thw")}
"""Validated families that the service computes by transformers' own class (`EngineModel`)."""

EPOCHS: Final[Mapping[str, int]] = {}
"""`model_type` -> number of releases in the tested range that have mended SGLang's code of that family.
Mended code computes other values from the same checkpoint: an epoch other than 0 is part of the key, so
that a server before the mending and one after it share nothing."""


def validated_families(dtype: str, kind: str = "image") -> frozenset[str]:
    """Families whose images are shared by the installed SGLang with this dtype.

    `tests/integration/test_families.py` has compared this release's embeddings with those of the encoder
    service. Of the others SGLang 0.5.23 computes Gemma 3's SigLIP with CLIP's activation, does not load
    LLaVA-1.5 as it is published, and leaves LLaVA-NeXT, LLaVA-OneVision and InternVL (-hf) to its generic
    backend, which has no call that could be hooked.

    The kinds "own image", "own video" and "own audio" are of embeddings that SGLang's servers share among
    themselves, keyed by the tensors that enter the tower (`tests/integration/test_own_towers.py`).
    """
    return validated("sglang", SUPPORTED_VERSIONS.installed(), dtype, kind)


class Hook(NamedTuple):
    """A hook on a function of SGLang. Its signature, by `sglang.srt.plugins.hook_registry.HookType`:

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
    """Parameter -> argument of a call of `target`, defaults included.

    Hooks read arguments by name: SGLang's signatures change from release to release.
    """
    bound = _signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
