"""Seals and signatures made with the store's secret, and the forms of an embedding outside the store.

Engines' requests over HTTP are sealed. Only processes that have `store.secret_file` can send requests and
replies, and read them.

    engine  ── Authorization: Cornplug-Engine base64(time, salt, proof); body sealed under the salt ─> service
            <── salt of the reply, reply sealed under both salts ────────────────────────────────────

The proof is a signature over time and salt. The service checks it before reading any of the body. Bodies are
sealed with AES-256-GCM. Each body has its own key, HKDF-SHA256(secret, salts, direction), so a constant nonce
is safe. A reply can be opened only with the seal of its request. A request is not valid as a reply, and a
reply is not valid as a request. A body begins with the protocol's version. Needs the package "cryptography",
which is imported at the first use, but not torch.

`SignedClaim` is a statement about an embedding that the service sends to SGLang, whose socket is not
authenticated. It contains the model identity and the media digests. The signature is made with the store's
secret. It also covers the embedding's bytes and the grids, because the grids determine the positions of an
image's tokens and therefore the KV. A receiver that has the secret may compute embedding keys from a valid
statement, and share KV under these keys. An embedding without a valid statement is used as in SGLang without
cornplug. Neither the embedding nor KV that depends on it is shared. `sign` and `is_signed` create and check
the signatures in all of the service's signed formats.

An embedding outside the store is a safetensors file or a handle. The file's tensor is named "embedding". The
other fields of a reply are JSON, under "cornplug" in the file's metadata
(https://github.com/huggingface/safetensors#format).

A handle is a signed text that an app sends to an engine instead of an image. It contains the model's
identity, the digest of the media item, and the key of the embedding in the store. It is signed with the
store's secret. An app can therefore read a handle but not change it, and every process that has the secret
accepts it. The engine computes the embedding key itself, from the handle's claims and the request's
`cache_salt`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.formats.messages import PROTOCOL_VERSION, WireTensor
from cornplug.errors import CodecError, EncoderRefused, EncoderUnavailable
from cornplug.identity import DIGEST_BYTES, digest, keyed_digest
from cornplug.store.disk.record_format import derive_key

ENGINE_PATH: Final = "/v1/engine"
MEDIA_TYPE: Final = "application/octet-stream"
SCHEME: Final = "Cornplug-Engine "
MAX_AGE_S: Final = 60.0
"""Maximum difference in seconds between the time in a proof and the service's clock, in either direction."""
MAX_SEEN_SALTS: Final = 1 << 16
"""Maximum number of remembered salts. If a request whose salt was forgotten is replayed, this costs a tower
pass."""
_PROOF_DOMAIN: Final = "cornplug-engine-proof-v1"
_REQUEST_DIRECTION: Final = b"cornplug engine request 1"
_REPLY_DIRECTION: Final = b"cornplug engine answer 1"
_SALT_BYTES: Final = 32
_HEAD: Final = struct.Struct("<d32s")
_VERSION: Final = struct.Struct("<I")
_NONCE: Final = bytes(12)
_TENSOR: Final = "embedding"
_FIELDS: Final = "cornplug"
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Name of each dtype in safetensors, by torch's name."""
_ALIGNMENT_BYTES: Final = 8
_HANDLE_DOMAIN: Final = "cornplug-embedding-handle-v1"
_IDENTITY_FIELD: Final = "cornplug_identity"
_MEDIA_FIELD: Final = "cornplug_media"
_PROOF_FIELD: Final = "cornplug_proof"
"""Names of a `SignedClaim`'s fields in a message to SGLang."""
_CLAIM_DOMAIN: Final = "cornplug-statement-v2"
_SALT_DOMAIN: Final = "cornplug-sglang-salt-v1"
Grid = Sequence[Sequence[int]]
"""(frames, height, width) in patches, one row for each image. Values must fit into 64 bits."""
EMBEDDING_MEDIA_TYPE: Final = "application/vnd.safetensors"
HANDLE_PREFIX: Final = "cornplug1."
HANDLE_LIFETIME_S: Final = 24 * 3600.0
_MAX_HANDLE_CHARS: Final = 4096
"""Maximum length of a handle's text. Longer texts are not parsed."""


class InvalidSeal(Exception):
    """Raised if bytes are not sealed with this secret, or are sealed for another request."""


class EngineSeal:
    """Seal of one request and its replies. The engine and the service each have their own object for the
    request."""

    def __init__(self, secret: bytes, head: bytes) -> None:
        """Create a seal. `head` is the time and salt in the request's header, which the proof covers."""
        self._secret = secret
        self._head = head

    @classmethod
    def new(cls, secret: bytes) -> Self:
        """Create the seal for a new request. Use it for only one body."""
        return cls(secret, _HEAD.pack(time.time(), secrets.token_bytes(_SALT_BYTES)))

    @property
    def authorization(self) -> str:
        """Value of the request's Authorization header."""
        proof = sign(self._secret, _PROOF_DOMAIN, self._head)
        return SCHEME + base64.b64encode(self._head + proof).decode()

    def seal_request(self, message: bytes) -> bytes:
        """Return the request's body, which contains the sealed message."""
        return self._seal(_REQUEST_DIRECTION, self._head, message)

    def open_request(self, body: bytes) -> bytes | None:
        """Return the message in a request's body, or None if the engine uses another protocol version. Raises
        InvalidSeal."""
        version, message = self._open(_REQUEST_DIRECTION, self._head, body)
        return message if version == PROTOCOL_VERSION else None

    def seal_reply(self, message: bytes) -> bytes:
        """Return the body of a reply, which contains the sealed message. Each call uses a new salt, because a
        replayed request gets several replies."""
        salt = secrets.token_bytes(_SALT_BYTES)
        return salt + self._seal(_REPLY_DIRECTION, self._head + salt, message)

    def open_reply(self, body: bytes) -> bytes:
        """Return the message in a reply's body.

        Raises InvalidSeal, or EncoderUnavailable("encoder_version") if the service uses another protocol
        version.
        """
        salt = body[:_SALT_BYTES]
        version, message = self._open(_REPLY_DIRECTION, self._head + salt, memoryview(body)[_SALT_BYTES:])
        if version != PROTOCOL_VERSION:
            raise EncoderUnavailable(
                f"the service uses protocol version {version}, this client {PROTOCOL_VERSION}",
                reason="encoder_version",
            )
        return message

    def _seal(self, direction: bytes, salts: bytes, message: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = derive_key(self._secret, salt=salts, info=direction)
        return AESGCM(key).encrypt(_NONCE, _VERSION.pack(PROTOCOL_VERSION) + message, None)

    def _open(self, direction: bytes, salts: bytes, body: bytes | memoryview) -> tuple[int, bytes]:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = derive_key(self._secret, salt=salts, info=direction)
        try:
            plain = AESGCM(key).decrypt(_NONCE, body, None)
        except (InvalidTag, ValueError) as e:
            raise InvalidSeal("not sealed with this store.secret_file for this request") from e
        if len(plain) < _VERSION.size:
            raise InvalidSeal("the body has no version")
        return _VERSION.unpack_from(plain)[0], plain[_VERSION.size :]


class SealChecker:
    """Checks Authorization headers before the service reads a body. Thread-safe."""

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        """Create a checker. `clock` returns Unix time in seconds."""
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def check(self, authorization: str) -> EngineSeal:
        """Check a request's Authorization header and return the request's seal.

        Raises EncoderRefused("unauthorized") if the header has no proof, or if the proof was made with
        another secret, has expired, or was already used.
        """
        try:
            token = base64.b64decode(authorization.removeprefix(SCHEME), validate=True)
        except (binascii.Error, ValueError):
            token = b""
        head, proof = token[: _HEAD.size], token[_HEAD.size :]
        if not authorization.startswith(SCHEME) or not is_signed(proof, self._secret, _PROOF_DOMAIN, head):
            raise _unauthorized("the engine does not have this store.secret_file; use the same file for both")
        if len(head) != _HEAD.size:
            raise _unauthorized("the header has no proof of an engine")
        at_s, salt = _HEAD.unpack(head)
        age_s = self._clock() - at_s
        if not -MAX_AGE_S <= age_s <= MAX_AGE_S:
            raise _unauthorized(f"the proof is {age_s:.0f} s old; synchronise the clocks of both hosts")
        with self._lock:
            if salt in self._seen:
                raise _unauthorized("this request was already received")
            self._seen[salt] = None
            if len(self._seen) > MAX_SEEN_SALTS:
                self._seen.popitem(last=False)
        return EngineSeal(self._secret, head)


def sign(secret: bytes, domain: str, *parts: bytes) -> bytes:
    """Return a signature over these parts (32 bytes). It cannot be computed without the secret. `domain`
    identifies the format."""
    return keyed_digest(secret, domain, *parts)


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
        proof = sign(secret, _CLAIM_DOMAIN, *_signed_parts(identity, media, dtype, shape, grid, payload))
        return cls(identity=identity, media=tuple(media), proof=proof)

    def is_valid(
        self, secret: bytes, *, dtype: str, shape: tuple[int, int], grid: Grid, payload: bytes | memoryview
    ) -> bool:
        """Return whether this statement was signed with the secret for this tensor and these grids."""
        parts = _signed_parts(self.identity, self.media, dtype, shape, grid, payload)
        return is_signed(self.proof, secret, _CLAIM_DOMAIN, *parts)

    def to_fields(self) -> Mapping[str, str]:
        """Return the statement as named text fields, to add to a message."""
        return {
            _IDENTITY_FIELD: self.identity.hex(),
            _MEDIA_FIELD: ",".join(digest.hex() for digest in self.media),
            _PROOF_FIELD: self.proof.hex(),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self | None:
        """Return the statement in a message's fields, or None if the message has no statement. The signature
        is not verified.

        Raises CodecError("statement") if the fields are malformed.
        """
        texts = [fields.get(name) for name in (_IDENTITY_FIELD, _MEDIA_FIELD, _PROOF_FIELD)]
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


def prove_salt(secret: bytes, salt: str) -> str:
    """Return a proof, in hex, that an engine has the secret and sent this salt."""
    return sign(secret, _SALT_DOMAIN, salt.encode()).hex()


def is_salt_proved(proof: str | None, secret: bytes, salt: str) -> bool:
    """Return whether `proof` is the `prove_salt` of this salt."""
    try:
        return is_signed(bytes.fromhex(proof or ""), secret, _SALT_DOMAIN, salt.encode())
    except ValueError:
        return False


def pack_embedding(fields: Mapping[str, Any], tensor: WireTensor) -> bytes:
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


def unpack_embedding(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the tensor's bytes of a file that `pack_embedding` returned.

    Raises LookupError, TypeError or ValueError (including msgspec's errors) if the file is invalid.
    """
    size = int.from_bytes(file[:8], "little")
    header = msgspec.json.decode(file[8 : 8 + size])
    fields: dict[str, Any] = msgspec.json.decode(header["__metadata__"][_FIELDS])
    start, end = header[_TENSOR]["data_offsets"]
    return fields, file[8 + size + start : 8 + size + end]


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
        if not is_signed(proof, secret, _HANDLE_DOMAIN, claims):
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
        return (
            f"{HANDLE_PREFIX}{_encode_base64(claims)}.{_encode_base64(sign(secret, _HANDLE_DOMAIN, claims))}"
        )

    @classmethod
    def _parse_text(cls, text: str) -> tuple[Self, bytes, bytes]:
        wrong = CodecError("not an embedding handle of an encoder service", reason="handle_malformed")
        if not text.startswith(HANDLE_PREFIX) or len(text) > _MAX_HANDLE_CHARS or text.count(".") != 2:
            raise wrong
        try:
            claims, proof = (_decode_base64(part) for part in text.removeprefix(HANDLE_PREFIX).split("."))
            handle = msgspec.json.decode(claims, type=cls)
        except (binascii.Error, ValueError) as e:
            raise wrong from e
        if {len(handle.identity), len(handle.media), len(handle.key), len(proof)} != {DIGEST_BYTES}:
            raise wrong
        return handle, claims, proof


def _unauthorized(problem: str) -> EncoderRefused:
    return EncoderRefused(f"authorization: {problem}", reason="unauthorized")


def _signed_parts(
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


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
