"""What an app may hand to an engine instead of an image: a claim that the service has signed.

    service ──signs──> voucher ──in the answer──> app ──in its request──> engine with the same secret

It says which model made which embedding of which medium, and where the store has it. Signed with
the store's secret, it is believed by whoever has that; an app can read it and change nothing of it.
It is no name: an engine makes the embedding key itself, of the claims and of its request's salt.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, Self

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.wire.signing import is_signed, sign
from cornplug.errors import CodecError
from cornplug.identity import DIGEST_BYTES

PREFIX: Final = "cornplug1."
LIFETIME_S: Final = 24 * 3600.0
_DOMAIN: Final = "cornplug-voucher-v1"
_MAX_CHARS: Final = 4096


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One embedding, and what it was computed from."""

    family: str
    modality: Modality
    identity: bytes
    """`identity.model_identity` of the model, under its dtype and preprocessing."""
    media: bytes
    """The media digest."""
    key: bytes
    """Where the store has it: of the salt that the app gave to the service."""
    dtype: str
    grid: tuple[int, ...]
    """(frames, height, width) in patches, where the model's placeholders depend on them; else ()."""
    expires: float
    """Seconds of the Unix clock."""

    @classmethod
    def read(cls, text: str) -> Self:
        """The claims, believed by nobody yet. Raises CodecError("voucher") for what is none."""
        return cls._parsed(text)[0]

    @classmethod
    def checked(cls, text: str, secret: bytes, *, now: float) -> Self:
        """The claims of somebody who has the secret.

        Raises CodecError: "voucher" (no voucher), "voucher_proof" (signed by nobody that we know)
        or "voucher_expired". `now` in seconds of the Unix clock.
        """
        voucher, claims, proof = cls._parsed(text)
        if not is_signed(proof, secret, _DOMAIN, claims):
            raise CodecError(
                "the voucher is not signed by this store's secret: encode with a service that shares "
                "store.secret_file, or send the embedding by value",
                reason="voucher_proof",
            )
        if now >= voucher.expires:
            raise CodecError("the voucher has expired; encode again", reason="voucher_expired")
        return voucher

    def signed(self, secret: bytes) -> str:
        """As text, some 600 characters that need no quoting anywhere."""
        claims = msgspec.json.encode(self)
        return f"{PREFIX}{_text(claims)}.{_text(sign(secret, _DOMAIN, claims))}"

    @classmethod
    def _parsed(cls, text: str) -> tuple[Self, bytes, bytes]:
        wrong = CodecError("this is no voucher of an encoder service", reason="voucher")
        if not text.startswith(PREFIX) or len(text) > _MAX_CHARS or text.count(".") != 2:
            raise wrong
        try:
            claims, proof = (_bytes(part) for part in text.removeprefix(PREFIX).split("."))
            voucher = msgspec.json.decode(claims, type=cls)
        except (binascii.Error, ValueError) as e:
            raise wrong from e
        if {len(voucher.identity), len(voucher.media), len(voucher.key), len(proof)} != {DIGEST_BYTES}:
            raise wrong
        return voucher, claims, proof


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
