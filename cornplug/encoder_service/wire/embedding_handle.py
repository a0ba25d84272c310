"""Embedding handle: a signed text that an app sends to an engine instead of an image.

    service ──signs──> handle ──in the reply──> app ──in its request──> engine with the same secret

A handle contains the identity of the model, the digest of the medium, and the key of the embedding in the
store. It is signed with the store's secret, so an app can read it but not change it, and every process that
has the secret accepts it. The engine computes the embedding key itself, from the claims and the request's
`cache_salt`.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, Self

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.wire.signed_claims import is_signed, sign
from cornplug.errors import CodecError
from cornplug.identity import DIGEST_BYTES

PREFIX: Final = "cornplug1."
LIFETIME_S: Final = 24 * 3600.0
_DOMAIN: Final = "cornplug-embedding-handle-v1"
_MAX_CHARS: Final = 4096


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of a handle about one embedding, and the model and medium that it was computed from."""

    family: str
    modality: Modality
    identity: bytes
    """`identity.model_identity` of the model, which includes its dtype and preprocessing."""
    media: bytes
    """Digest of the medium that the embedding was computed from."""
    key: bytes
    """Embedding key, which includes the `cache_salt` that the app sent to the service."""
    dtype: str
    grid: tuple[int, ...]
    """(frames, height, width) in patches if the model's placeholders depend on the grid, or else ()."""
    expires: float
    """Unix time in seconds at which the handle expires."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the claims in a handle's text without verifying the signature. Raises
        CodecError("handle_malformed")."""
        return cls._parsed(text)[0]

    @classmethod
    def checked(cls, text: str, secret: bytes, *, now: float) -> Self:
        """Verify a handle's text with the secret, and return the claims. `now` is Unix time in seconds.

        Raises CodecError: "handle_malformed", "handle_signature" (another secret) or "handle_expired".
        """
        handle, claims, proof = cls._parsed(text)
        if not is_signed(proof, secret, _DOMAIN, claims):
            raise CodecError(
                "the embedding handle is not signed with this store's secret; encode with a service that "
                "uses the same store.secret_file, or send the embedding by value",
                reason="handle_signature",
            )
        if now >= handle.expires:
            raise CodecError("the embedding handle has expired; encode again", reason="handle_expired")
        return handle

    def signed(self, secret: bytes) -> str:
        """Return the handle's text, about 600 URL-safe characters."""
        claims = msgspec.json.encode(self)
        return f"{PREFIX}{_text(claims)}.{_text(sign(secret, _DOMAIN, claims))}"

    @classmethod
    def _parsed(cls, text: str) -> tuple[Self, bytes, bytes]:
        wrong = CodecError("not an embedding handle of an encoder service", reason="handle_malformed")
        if not text.startswith(PREFIX) or len(text) > _MAX_CHARS or text.count(".") != 2:
            raise wrong
        try:
            claims, proof = (_bytes(part) for part in text.removeprefix(PREFIX).split("."))
            handle = msgspec.json.decode(claims, type=cls)
        except (binascii.Error, ValueError) as e:
            raise wrong from e
        if {len(handle.identity), len(handle.media), len(handle.key), len(proof)} != {DIGEST_BYTES}:
            raise wrong
        return handle, claims, proof


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
