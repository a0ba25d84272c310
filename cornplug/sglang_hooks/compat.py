"""Definitions that depend on SGLang's version: the tested range of versions, the validated families, the form
of hooks, and the salt of a request.

SGLang loads plugins by entry point, and its hook registry can hook any of SGLang's functions. Each module of
this package lists its hooks (`HOOKS`), and `plugin.py` registers them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from cornplug.checkpoints.tested_releases import VersionRange, compared_families

logger = logging.getLogger("sglang.cornplug")

SUPPORTED_VERSIONS: Final = VersionRange("SGLang", "sglang", (0, 5, 23), (0, 5, 24))
"""Tested range of SGLang versions. It excludes 0.5.22, although the hooked functions have the same
parameters. HiCache in 0.5.22 copies a page to host memory without waiting for the forward pass that may still
write the page (`write_fence_stream` was added in 0.5.23). Every engine that reads this page from the store
would then compute wrong results."""

GENERIC_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {"glm4v": ("pixel_values", "image_grid_thw")}
"""Names of the tower's inputs, by `model_type`, for validated families for which the encoder service uses
transformers' own class (`EngineModel`)."""

EPOCHS: Final[Mapping[str, int]] = {}
"""Number of releases in the tested range that changed a family's results (for example by a bug fix), by
`model_type`. A number other than 0 is part of the key, so that servers before and after the change do not
share."""

_SALT_MARK: Final = "\x00"
"""First character of every salt that differs from the request's `cache_salt`. A client's own salt is unlikely
to begin with this character."""


def validated_families(dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the families for which the installed SGLang shares image embeddings in this dtype.

    For these families, `tests/integration/test_families.py` has compared this release's embeddings with the
    encoder service's embeddings. Some other families cannot be shared. SGLang 0.5.23 computes Gemma 3's
    SigLIP with CLIP's activation, and cannot load LLaVA-1.5 as published. It runs LLaVA-NeXT, LLaVA-OneVision
    and InternVL (-hf) with its generic backend, which has no function that could be hooked.

    The kinds "own image", "own video" and "own audio" are for embeddings that only SGLang servers share.
    Their keys depend on the tensors that enter the tower (`tests/integration/test_own_towers.py`).
    """
    return compared_families("sglang", SUPPORTED_VERSIONS.installed_version(), dtype, kind)


class Hook(NamedTuple):
    """Hook on a function of SGLang.

    `function` depends on `kind`, as in `sglang.srt.plugins.hook_registry.HookType`:

        before      before(*args, **kwargs) -> (args, kwargs) or None
        after       after(result, *args, **kwargs) -> result or None
        around      around(original, *args, **kwargs) -> result
        replace     a function or class, used instead of the target
    """

    target: str
    """Dotted path of the hooked function, method or class of SGLang."""
    kind: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    reads: tuple[str, ...] = ()
    """Names of the target's parameters that `function` reads by name (see `bind_arguments`)."""


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def bind_arguments(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Map the arguments of a call to the names of `target`'s parameters, including default values.

    Hooks read arguments by name, because SGLang's signatures change between releases.
    """
    bound = _signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Return the salt of a request's embeddings and KV pages. None means the domain of the whole deployment.

    A `cache_salt` without an `extra_key` is used unchanged, so it selects the same domain as in vLLM. A
    user's `extra_key` (without the LoRA id that SGLang appends) selects another domain. Different pairs of
    `cache_salt` and `extra_key` have different salts. Absent and empty values count as different.
    """
    if extra_key is None and (cache_salt is None or not cache_salt.startswith(_SALT_MARK)):
        return cache_salt
    parts = [_SALT_MARK]
    for name, value in (("salt", cache_salt), ("extra-key", extra_key)):
        if value is not None:
            parts.append(f"{name}:{len(value.encode())}:{value}")
    return "".join(parts)


def salt_of_request(request: Any) -> str | None:
    """Return the salt (`salt_of`) of an SGLang request of any request class."""
    return salt_of(getattr(request, "cache_salt", None), getattr(request, "extra_key", None))
