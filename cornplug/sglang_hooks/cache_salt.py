"""Combines the namespaces of an SGLang request into one salt."""

from __future__ import annotations

from typing import Any, Final

_MARK: Final = "\x00"
"""Prefix of every salt that is not just a request's `cache_salt`. Clients do not use it by accident."""


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Return the salt of a request's embeddings and pages. None is the deployment's shared domain.

    A `cache_salt` alone is used unchanged, so it names the same domain as in vLLM. A user's `extra_key`
    (without the LoRA id that SGLang appends) makes another domain. The encoding distinguishes all pairs of
    the two, including absent and empty values.
    """
    if extra_key is None and (cache_salt is None or not cache_salt.startswith(_MARK)):
        return cache_salt
    parts = [_MARK]
    for name, value in (("salt", cache_salt), ("extra-key", extra_key)):
        if value is not None:
            parts.append(f"{name}:{len(value.encode())}:{value}")
    return "".join(parts)


def salt_of_request(request: Any) -> str | None:
    """Return `salt_of` for the `cache_salt` and `extra_key` of any of SGLang's request classes."""
    return salt_of(getattr(request, "cache_salt", None), getattr(request, "extra_key", None))
