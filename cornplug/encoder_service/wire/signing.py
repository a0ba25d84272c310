"""Signatures with the store's secret, created and checked in the same way for every signed format."""

from __future__ import annotations

import hmac

from cornplug.identity import keyed


def sign(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """Return 32 bytes that only a holder of the secret can compute from these parts. `domain` identifies the
    format."""
    return keyed(secret, domain, *parts)


def is_signed(proof: bytes, secret: bytes, domain: str, *parts: bytes) -> bool:
    """Return whether `proof` is the signature of these parts. Compares in constant time."""
    return hmac.compare_digest(proof, sign(secret, domain, *parts))
