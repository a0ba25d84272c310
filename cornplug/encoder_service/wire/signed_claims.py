"""Signed statement about an embedding that the encoder service sends to SGLang, whose socket is not
authenticated.

A statement contains the model identity and the media digests. The signature, made with the store's secret,
also covers the embedding's bytes and the grids, which determine the positions of an image's tokens and
therefore the KV. A receiver that has the secret may compute embedding keys from a valid statement, and share
KV under these keys. An embedding without a valid statement is used as SGLang without cornplug uses it.
Neither the embedding nor KV that depends on it is shared.

`sign` and `is_signed` create and check the signatures of all signed formats of the service.
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
"""(frames, height, width) in patches, one row for each image. Values must fit into 64 bits."""


def sign(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """Return a signature of these parts (32 bytes), which cannot be computed without the secret. `domain`
    identifies the format."""
    return keyed(secret, domain, *parts)


def is_signed(proof: bytes, secret: bytes, domain: str, *parts: bytes) -> bool:
    """Return whether `proof` is the signature of these parts. The comparison takes constant time."""
    return hmac.compare_digest(proof, sign(secret, domain, *parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedClaim:
    """Signed statement that a model computed an embedding from these media, in this order."""

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
        """Create a signed statement about `payload`, which has the bytes of a (rows, hidden_size) tensor."""
        proof = sign(secret, _DOMAIN, *_parts(identity, media, dtype, shape, grid, payload))
        return cls(identity=identity, media=tuple(media), proof=proof)

    def holds(
        self, secret: bytes, *, dtype: str, shape: tuple[int, int], grid: Grid, payload: bytes | memoryview
    ) -> bool:
        """Return whether this statement was signed with the secret for this tensor and these grids."""
        parts = _parts(self.identity, self.media, dtype, shape, grid, payload)
        return is_signed(self.proof, secret, _DOMAIN, *parts)

    def fields(self) -> Mapping[str, str]:
        """Return the statement as named text fields, to add to a message."""
        return {
            _IDENTITY: self.identity.hex(),
            _MEDIA: ",".join(digest.hex() for digest in self.media),
            _PROOF: self.proof.hex(),
        }

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> Self | None:
        """Return the statement in a message's fields, or None if the message has no statement. Does not
        verify the signature.

        Raises CodecError("statement") if the fields are malformed.
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
    """Return a proof, in hex, with which an engine shows that it has the secret and sent this salt."""
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
