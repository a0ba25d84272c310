"""Combines an SGLang request's `cache_salt` and `extra_key` into one salt."""

from __future__ import annotations

from typing import Any, Final

_MARK: Final = "\x00"
"""Prefix of every salt that differs from the request's `cache_salt`. A client's own salt is unlikely to begin
with this character."""


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Return the salt of a request's embeddings and KV pages, or None for the deployment's shared domain.

    A `cache_salt` without an `extra_key` is used unchanged, so it selects the same domain as in vLLM. A
    user's `extra_key` (without the LoRA id that SGLang appends) selects another domain. All pairs of a
    `cache_salt` and an `extra_key` have different salts, including absent and empty values.
    """
    if extra_key is None and (cache_salt is None or not cache_salt.startswith(_MARK)):
        return cache_salt
    parts = [_MARK]
    for name, value in (("salt", cache_salt), ("extra-key", extra_key)):
        if value is not None:
            parts.append(f"{name}:{len(value.encode())}:{value}")
    return "".join(parts)


def salt_of_request(request: Any) -> str | None:
    """Return the salt (`salt_of`) of an SGLang request, which may be of any request class."""
    return salt_of(getattr(request, "cache_salt", None), getattr(request, "extra_key", None))
