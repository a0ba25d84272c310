"""Formats of an embedding outside the store: a safetensors file, and a handle. This module does not need
torch.

The file's tensor is named "embedding". The other fields of a reply are JSON, under "cornplug" in the file's
metadata (https://github.com/huggingface/safetensors#format).

A handle is a signed text that an app sends to an engine instead of an image. It contains the model's
identity, the digest of the media item, and the key of the embedding in the store. It is signed with the
store's secret. An app can therefore read a handle but not change it, and every process that has the secret
accepts it. The engine computes the embedding key itself, from the handle's claims and the request's
`cache_salt`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.wire.engine_seal import is_signed, sign
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.errors import CodecError
from cornplug.identity import DIGEST_BYTES

MEDIA_TYPE: Final = "application/vnd.safetensors"
_TENSOR: Final = "embedding"
_FIELDS: Final = "cornplug"
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Name of each dtype in safetensors, by torch's name."""
_ALIGNMENT_BYTES: Final = 8


def pack(fields: Mapping[str, Any], tensor: WireTensor) -> bytes:
    """Return the bytes of a file with the tensor and the other fields. The tensor's bytes are copied only
    once."""
    header = msgspec.json.encode(
        {
            "__metadata__": {_FIELDS: msgspec.json.encode(fields).decode()},
            _TENSOR: {
                "dtype": _DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (0, len(tensor.data)),
            },
        }
    )
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    return b"".join((len(header).to_bytes(8, "little"), header, tensor.data))


def unpack(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the tensor's bytes of a file that `pack` returned.

    Raises LookupError, TypeError or ValueError (including msgspec's errors) if the file is invalid.
    """
    size = int.from_bytes(file[:8], "little")
    header = msgspec.json.decode(file[8 : 8 + size])
    fields: dict[str, Any] = msgspec.json.decode(header["__metadata__"][_FIELDS])
    start, end = header[_TENSOR]["data_offsets"]
    return fields, file[8 + size + start : 8 + size + end]


HANDLE_PREFIX: Final = "cornplug1."
HANDLE_LIFETIME_S: Final = 24 * 3600.0
_DOMAIN: Final = "cornplug-embedding-handle-v1"
_MAX_CHARS: Final = 4096


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of a handle about one embedding, and about the model and media item from which it was
    computed."""

    family: str
    modality: Modality
    identity: bytes
    """`identity.model_identity` of the model. It includes the dtype and preprocessing."""
    media: bytes
    """Digest of the media item from which the embedding was computed."""
    key: bytes
    """Embedding key. It includes the `cache_salt` that the app sent to the service."""
    dtype: str
    grid: tuple[int, ...]
    """(frames, height, width) in patches if the model's placeholders depend on the grid, otherwise ()."""
    expires: float
    """Unix time in seconds at which the handle expires."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the claims in a handle's text without verifying the signature. Raises
        CodecError("handle_malformed")."""
        return cls._parse_text(text)[0]

    @classmethod
    def verify(cls, text: str, secret: bytes, *, now: float) -> Self:
        """Verify a handle's text with the secret, and return the claims. `now` is Unix time in seconds.

        Raises CodecError: "handle_malformed", "handle_signature" (signed with another secret) or
        "handle_expired".
        """
        handle, claims, proof = cls._parse_text(text)
        if not is_signed(proof, secret, _DOMAIN, claims):
            raise CodecError(
                "the embedding handle is not signed with this store's secret; encode with a service that "
                "uses the same store.secret_file, or send the embedding by value",
                reason="handle_signature",
            )
        if now >= handle.expires:
            raise CodecError("the embedding handle has expired; encode again", reason="handle_expired")
        return handle

    def to_signed_text(self, secret: bytes) -> str:
        """Return the handle's text, about 600 URL-safe characters."""
        claims = msgspec.json.encode(self)
        return f"{HANDLE_PREFIX}{_encode_base64(claims)}.{_encode_base64(sign(secret, _DOMAIN, claims))}"

    @classmethod
    def _parse_text(cls, text: str) -> tuple[Self, bytes, bytes]:
        wrong = CodecError("not an embedding handle of an encoder service", reason="handle_malformed")
        if not text.startswith(HANDLE_PREFIX) or len(text) > _MAX_CHARS or text.count(".") != 2:
            raise wrong
        try:
            claims, proof = (_decode_base64(part) for part in text.removeprefix(HANDLE_PREFIX).split("."))
            handle = msgspec.json.decode(claims, type=cls)
        except (binascii.Error, ValueError) as e:
            raise wrong from e
        if {len(handle.identity), len(handle.media), len(handle.key), len(proof)} != {DIGEST_BYTES}:
            raise wrong
        return handle, claims, proof


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
