"""Signatures with the store's secret: one way to make and to check them, for every signed format."""

from __future__ import annotations

import hmac

from cornplug.identity import keyed


def sign(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """32 bytes that only a holder of the secret can make of these parts. `domain` names the format."""
    return keyed(secret, domain, *parts)


def is_signed(proof: bytes, secret: bytes, domain: str, *parts: bytes) -> bool:
    """Whether `proof` is the signature of these parts. Compares in constant time."""
    return hmac.compare_digest(proof, sign(secret, domain, *parts))
