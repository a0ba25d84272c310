"""Signed statement of the encoder about an embedding that it sends to an unauthenticated socket (SGLang's).

It contains the model identity, the media digests, and the grids, which determine the positions of an image's
tokens and so its KV. The signature, with the store's secret, covers the embedding's bytes: a receiver that
has the secret may compute embedding keys from the statement and share KV under them. An embedding without a
valid statement is used as stock SGLang uses it, and neither it nor its KV is shared.

`sign` and `is_signed` create and check signatures with the store's secret for every signed format.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from cornplug.errors import CodecError
from cornplug.identity import DIGEST_BYTES, digest, keyed

_IDENTITY: Final = "cornplug_identity"
_MEDIA: Final = "cornplug_media"
_PROOF: Final = "cornplug_proof"
_DOMAIN: Final = "cornplug-statement-v2"
_SALT_DOMAIN: Final = "cornplug-sglang-salt-v1"
Grid = Sequence[Sequence[int]]
"""(frames, height, width) in patches, one row per image; 64-bit counts."""


def sign(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """Return 32 bytes that only a holder of the secret can compute from these parts. `domain` identifies the
    format."""
    return keyed(secret, domain, *parts)


def is_signed(proof: bytes, secret: bytes, domain: str, *parts: bytes) -> bool:
    """Return whether `proof` is the signature of these parts. Compares in constant time."""
    return hmac.compare_digest(proof, sign(secret, domain, *parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedClaim:
    """Signed statement that this model computed these rows from these media, in this order."""

    identity: bytes
    """`identity.model_identity` of the encoder's model."""
    media: tuple[bytes, ...]
    """Media digests, one per image."""
    proof: bytes

    @classmethod
    def sign(
        cls,
        secret: bytes,
        *,
        identity: bytes,
        media: Sequence[bytes],
        dtype: str,
        shape: tuple[int, int],
        grid: Grid,
        payload: bytes | memoryview,
    ) -> Self:
        """Create a statement about `payload`, the bytes of a (rows, hidden_size) tensor."""
        proof = sign(secret, _DOMAIN, *_parts(identity, media, dtype, shape, grid, payload))
        return cls(identity=identity, media=tuple(media), proof=proof)

    def holds(
        self, secret: bytes, *, dtype: str, shape: tuple[int, int], grid: Grid, payload: bytes | memoryview
    ) -> bool:
        """Return whether a holder of the secret signed this statement about these bytes."""
        parts = _parts(self.identity, self.media, dtype, shape, grid, payload)
        return is_signed(self.proof, secret, _DOMAIN, *parts)

    def fields(self) -> Mapping[str, str]:
        """Return the statement as text, for a message with named fields."""
        return {
            _IDENTITY: self.identity.hex(),
            _MEDIA: ",".join(digest.hex() for digest in self.media),
            _PROOF: self.proof.hex(),
        }

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> Self | None:
        """Return the statement in a message's fields, or None if the fields are absent.

        Raises CodecError("statement") for malformed fields.
        """
        texts = [fields.get(name) for name in (_IDENTITY, _MEDIA, _PROOF)]
        if all(text is None for text in texts):
            return None
        try:
            identity, media, proof = (text for text in texts if isinstance(text, str))
            digests = (bytes.fromhex(identity), *map(bytes.fromhex, media.split(",")), bytes.fromhex(proof))
        except ValueError:
            raise CodecError("the embedding's statement cannot be read", reason="statement") from None
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise CodecError("the embedding's statement has digests of a wrong size", reason="statement")
        return cls(identity=digests[0], media=digests[1:-1], proof=digests[-1])


def salt_proof(secret: bytes, salt: str) -> str:
    """Return a proof in hex that an engine with the secret sent this salt."""
    return sign(secret, _SALT_DOMAIN, salt.encode()).hex()


def salt_is_proved(proof: str | None, secret: bytes, salt: str) -> bool:
    """Return whether `proof` is the `salt_proof` of this salt."""
    try:
        return is_signed(bytes.fromhex(proof or ""), secret, _SALT_DOMAIN, salt.encode())
    except ValueError:
        return False


def _parts(
    identity: bytes,
    media: Sequence[bytes],
    dtype: str,
    shape: tuple[int, int],
    grid: Grid,
    payload: bytes | memoryview,
) -> tuple[bytes, ...]:
    packed = struct.pack(">QQ", *shape)
    grids = digest("grid", *(struct.pack(f">{len(row)}Q", *row) for row in grid))
    content = hashlib.sha256(payload).digest()
    return identity, dtype.encode(), packed, grids, content, *media
