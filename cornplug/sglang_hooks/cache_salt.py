"""SGLang's namespaces of a request as the one salt that identities know."""

from __future__ import annotations

from typing import Any, Final

_MARK: Final = "\x00"
"""Begins every salt that is not a request's `cache_salt` alone: no client writes it by accident."""


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """The salt of a request's embeddings and pages; None is the deployment's shared domain.

    A `cache_salt` alone is itself, so that it names the same domain as vLLM's. An `extra_key`
    of the user's (not LoRA's, which SGLang appends to it) makes another domain; the encoding
    tells apart every pair of the two, absent and empty ones included.
    """
    if extra_key is None and (cache_salt is None or not cache_salt.startswith(_MARK)):
        return cache_salt
    parts = [_MARK]
    for name, value in (("salt", cache_salt), ("extra-key", extra_key)):
        if value is not None:
            parts.append(f"{name}:{len(value.encode())}:{value}")
    return "".join(parts)


def salt_of_request(request: Any) -> str | None:
    """`salt_of` the `cache_salt` and `extra_key` of a request, of any of SGLang's request classes."""
    return salt_of(getattr(request, "cache_salt", None), getattr(request, "extra_key", None))
