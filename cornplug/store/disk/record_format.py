"""Formats of records on disk and in far stores. This module does no I/O.

A disk record consists of an unencrypted header and the sealed (encrypted) entry.

    magic "CPDR" | u16 version | u16 state | u64 payload bytes | u32 header bytes of the entry ("meta") |
    u16 app bytes | f64 seconds of recomputation | f64 time of writing (Unix) | 32-byte key | 16-byte salt |
    app | 16-byte tag of all the above with state 0
    sealed meta | sealed chunk of the payload ... | zeros up to a multiple of 4 KiB

All integers are little-endian. Records begin at multiples of 4 KiB, so that a damaged header hides only its
own record. The tag is keyed by the store's secret, so a scan rejects headers written with another secret.
`state` is the only field that is overwritten: 0 becomes 1 when the entry is deleted.

Each sealed piece consists of AES-256-GCM ciphertext and 16 bytes of tag. The associated data is the header
(with state 0), the nonce is the number of the piece, and only this record has the encryption key. A chunk has
CHUNK_BYTES of payload, so that part of a payload can be read and verified alone.

A record persists after the process that wrote it, and other users may be able to change it. The seal binds
the record to the sharing domain's secret. Each record has its own encryption key, HKDF-SHA256(secret, salt of
the record, domain name | entry's key), so nonces can be numbers, and no two records of one entry share a key
and a nonce. Only a store with a disk or a far
store needs the package "cryptography", which is imported at the first use.

Names and records in far stores reveal no content, app or tenant to the far store's operator.

    name      "cp1/" and HMAC-SHA256(key of names, entry's key) in hex
    record    magic "CPFR" | u16 version | 4-byte id of the sealing secret | 16-byte salt |
              u32 bytes of the sealed head | sealed head | sealed chunk of the payload ...

The head is msgpack. It has the app, seconds of recomputation, time of writing (Unix), size of the payload in
bytes, and the entry's header ("meta"). Pieces are sealed as on disk, but the associated data is all bytes
before the head, and the encryption key is HKDF-SHA256(sealing secret, salt, domain name | entry's key). So a
record that was put under another name, truncated or changed cannot be opened. An older record of the same key
has the same content, because keys are digests of the content.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

ALIGN_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20
TAG_BYTES: Final = 16
SALT_BYTES: Final = 16
MAGIC: Final = b"CPDR"
VERSION: Final = 1
STATE_OFFSET: Final = 6
"""Byte offset of the state in a record."""
DEAD_STATE: Final = b"\x01\x00"
_FIXED_FIELDS: Final = struct.Struct("<4sHHQIHdd32s16s")
_MAX_APP_BYTES: Final = 1024
MAX_HEADER_BYTES: Final = _FIXED_FIELDS.size + _MAX_APP_BYTES + TAG_BYTES
"""Maximum size of a header in bytes. A header is always within the first ALIGN_BYTES of its record."""
_MAX_META_BYTES: Final = 1 << 24

Authenticate = Callable[[bytes], bytes]
"""Function that returns the tag of a header's bytes."""
_RECORD_DOMAIN: Final = b"cornplug disk record 1"
_HEADER_DOMAIN: Final = b"cornplug disk header 1"
_KEY_BYTES: Final = 32
_META_PIECE: Final = 0
_NAME_DOMAIN: Final = b"cornplug far name 1"
_FAR_RECORD_DOMAIN: Final = b"cornplug far record 1"
_SECRET_DOMAIN: Final = b"cornplug far secret 1"
_FAR_PREFIX: Final = struct.Struct("<4sH4s16sI")
_FAR_MAGIC: Final = b"CPFR"
_FAR_VERSION: Final = 2
_MAX_FAR_HEAD_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Unencrypted description of a record's entry."""

    key: bytes
    app: str
    payload_bytes: int
    meta_bytes: int
    cost_s: float
    written_s: float
    """Unix time at which the entry was written, so that the time to live of a namespace applies after a
    restart too."""
    salt: bytes
    is_dead: bool = False

    @property
    def header_bytes(self) -> int:
        """Size of the header in bytes, including its tag."""
        return _FIXED_FIELDS.size + len(self.app.encode()) + TAG_BYTES

    @property
    def chunk_count(self) -> int:
        """Number of sealed chunks of the payload."""
        return -(-self.payload_bytes // CHUNK_BYTES)

    @property
    def used_bytes(self) -> int:
        """Size of the record without its padding in bytes."""
        sealed = self.meta_bytes + self.payload_bytes + TAG_BYTES * (1 + self.chunk_count)
        return self.header_bytes + sealed

    @property
    def record_bytes(self) -> int:
        """Size of the record with its padding in bytes."""
        return -(-self.used_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def chunk_at(self, number: int) -> tuple[int, int]:
        """Return (offset in the record, number of bytes including the tag) of a chunk of the payload."""
        start = self.header_bytes + self.meta_bytes + TAG_BYTES + number * (CHUNK_BYTES + TAG_BYTES)
        return start, min(CHUNK_BYTES, self.payload_bytes - number * CHUNK_BYTES) + TAG_BYTES


def encode_record_header(header: RecordHeader, authenticate: Authenticate) -> bytes:
    """Return the header's bytes with state 0, and its tag. Raises ValueError if a field does not fit."""
    app = header.app.encode()
    if len(app) > _MAX_APP_BYTES or header.meta_bytes > _MAX_META_BYTES:
        raise ValueError(
            f"an app name of {len(app)} bytes, or a header of {header.meta_bytes} bytes, is too long"
        )
    fields = (header.payload_bytes, header.meta_bytes, len(app), header.cost_s, header.written_s)
    body = _FIXED_FIELDS.pack(MAGIC, VERSION, 0, *fields, header.key, header.salt) + app
    return body + authenticate(body)


def decode_record_header(data: bytes, authenticate: Authenticate) -> RecordHeader | None:
    """Return the header at the start of `data`. Returns None if the header is incomplete, has another format
    or was written with another secret."""
    if len(data) < _FIXED_FIELDS.size or data[:4] != MAGIC:
        return None
    _, version, state, payload_bytes, meta_bytes, app_bytes, cost_s, written_s, key, salt = (
        _FIXED_FIELDS.unpack_from(data)
    )
    end = _FIXED_FIELDS.size + app_bytes
    if version != VERSION or app_bytes > _MAX_APP_BYTES or len(data) < end + TAG_BYTES:
        return None
    body = data[:STATE_OFFSET] + b"\0\0" + data[STATE_OFFSET + 2 : end]
    if authenticate(body) != data[end : end + TAG_BYTES]:
        return None
    app = data[_FIXED_FIELDS.size : end].decode(errors="replace")
    if not math.isfinite(cost_s) or not math.isfinite(written_s):
        return None
    return RecordHeader(key, app, payload_bytes, meta_bytes, cost_s, written_s, salt, is_dead=state != 0)


class RecordDamaged(Exception):
    """Raised if sealed bytes were changed, or sealed with another secret."""


def new_salt() -> bytes:
    """Return a salt for a new record."""
    return secrets.token_bytes(SALT_BYTES)


class RecordSealer:
    """Derives the keys of records from one secret. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._header_key = derive_key(secret, salt=None, info=_HEADER_DOMAIN)

    def header_tag(self, body: bytes) -> bytes:
        """Return the tag of a record's header."""
        return hashlib.blake2b(body, key=self._header_key, digest_size=TAG_BYTES).digest()

    def cipher(self, key: bytes, salt: bytes, header: bytes) -> RecordCipher:
        """Return the cipher of one record. `header` is the record's header with state 0, as bytes."""
        return RecordCipher(derive_key(self._secret, salt=salt, info=_RECORD_DOMAIN + key), header)


class RecordCipher:
    """Cipher that seals and opens the pieces of one record. Long calls run without the interpreter's lock."""

    def __init__(self, key: bytes, header: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._header, self._damaged = AESGCM(key), header, InvalidTag

    def seal_meta(self, meta: bytes) -> bytes:
        """Seal the entry's meta."""
        return self._cipher.encrypt(_nonce(_META_PIECE), meta, self._header)

    def open_meta(self, sealed: bytes | memoryview) -> bytes:
        """Open the entry's sealed meta. Raises RecordDamaged if it does not match its tag."""
        try:
            return self._cipher.decrypt(_nonce(_META_PIECE), sealed, self._header)
        except self._damaged as e:
            raise RecordDamaged from e

    def seal_chunk(self, number: int, payload: memoryview, target: memoryview) -> None:
        """Seal a chunk of the payload into `target`, which is larger by TAG_BYTES."""
        self._cipher.encrypt_into(_nonce(1 + number), payload, self._header, target)

    def open_chunk(self, number: int, sealed: memoryview, target: memoryview) -> None:
        """Open a chunk into the payload's memory. Raises RecordDamaged if the chunk does not match its tag.
        The content of the memory is then undefined."""
        try:
            self._cipher.decrypt_into(_nonce(1 + number), sealed, self._header, target)
        except self._damaged as e:
            raise RecordDamaged from e


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def derive_key(secret: bytes, *, salt: bytes | None, info: bytes) -> bytes:
    """Derive a key from the secret for the purpose `info`."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _KEY_BYTES, salt, info).derive(secret)


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """Description of an entry, which is encrypted at the start of the entry's record in a far store."""

    app: str
    cost_s: float
    written_s: float
    """Unix time at which the entry was written."""
    payload_bytes: int
    meta: bytes


_far_encoder: Final = msgspec.msgpack.Encoder()
_far_decoder: Final = msgspec.msgpack.Decoder(RecordHead)


@dataclass(frozen=True, slots=True)
class FarRecord:
    """Record whose head has been opened, and whose payload is still sealed."""

    head: RecordHead
    _cipher: RecordCipher
    _chunks: memoryview

    def open_into(self, target: memoryview) -> None:
        """Decrypt the payload into `target`. Raises RecordDamaged if the record was changed. The content of
        `target` is then undefined."""
        if target.nbytes != self.head.payload_bytes:
            raise RecordDamaged("the target has another size")
        for number in range(_chunk_count(target.nbytes)):
            start = number * (CHUNK_BYTES + TAG_BYTES)
            sealed = self._chunks[start : start + CHUNK_BYTES + TAG_BYTES]
            self._cipher.open_chunk(number, sealed, target[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])


class FarSealer:
    """Names, seals and opens records of one sharing domain. Thread-safe."""

    def __init__(self, secret: bytes, sealing_secrets: Sequence[bytes] = ()) -> None:
        """Create a sealer.

        Args:
            secret: Secret from which the names of records are derived.
            sealing_secrets: Secrets with which records can be opened. The first of them seals new records. If
                empty, `secret` opens and seals records.
        """
        self._name_key = derive_key(secret, salt=None, info=_NAME_DOMAIN)
        self._secrets_by_id = {
            derive_key(one, salt=None, info=_SECRET_DOMAIN)[:4]: one for one in sealing_secrets or (secret,)
        }
        self._newest_id = next(iter(self._secrets_by_id))

    def record_name(self, key: bytes) -> str:
        """Return the name of an entry's record."""
        return "cp1/" + hmac.digest(self._name_key, key, hashlib.sha256).hex()

    def sealed_bytes(self, head: RecordHead) -> int:
        """Return the size of an entry's record in bytes."""
        return (
            _FAR_PREFIX.size + len(_far_encoder.encode(head)) + TAG_BYTES + _sealed_bytes(head.payload_bytes)
        )

    def seal(self, key: bytes, head: RecordHead, payload: memoryview) -> bytes:
        """Return the sealed record of an entry."""
        salt, body = new_salt(), _far_encoder.encode(head)
        prefix = _FAR_PREFIX.pack(_FAR_MAGIC, _FAR_VERSION, self._newest_id, salt, len(body) + TAG_BYTES)
        cipher = _cipher(self._secrets_by_id[self._newest_id], key, salt, prefix)
        record = bytearray(_FAR_PREFIX.size + len(body) + TAG_BYTES + _sealed_bytes(payload.nbytes))
        at = _FAR_PREFIX.size + len(body) + TAG_BYTES
        record[:at] = prefix + cipher.seal_meta(body)
        with memoryview(record) as into:
            for number in range(_chunk_count(payload.nbytes)):
                piece = payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
                end = at + piece.nbytes + TAG_BYTES
                cipher.seal_chunk(number, piece, into[at:end])
                at = end
        return bytes(record)

    def open(self, key: bytes, record: bytes) -> FarRecord:
        """Open the record of an entry. Raises RecordDamaged if `record` belongs to another entry, was
        changed, or is sealed with a secret that this host does not have."""
        if len(record) < _FAR_PREFIX.size:
            raise RecordDamaged("the record is too short")
        magic, version, sealed_by, salt, head_bytes = _FAR_PREFIX.unpack_from(record)
        end = _FAR_PREFIX.size + head_bytes
        if (magic, version) != (
            _FAR_MAGIC,
            _FAR_VERSION,
        ) or not TAG_BYTES <= head_bytes <= _MAX_FAR_HEAD_BYTES:
            raise RecordDamaged("the bytes are not a record of this format")
        secret = self._secrets_by_id.get(sealed_by)
        if secret is None:
            raise RecordDamaged("the record is sealed with a secret that this host does not have")
        data = memoryview(record)
        cipher = _cipher(secret, key, salt, record[: _FAR_PREFIX.size])
        try:
            head = _far_decoder.decode(cipher.open_meta(data[_FAR_PREFIX.size : end]))
        except msgspec.MsgspecError as e:
            raise RecordDamaged("the record's head has the format of another release") from e
        chunks = data[end:]
        if head.payload_bytes < 0 or chunks.nbytes != _sealed_bytes(head.payload_bytes):
            raise RecordDamaged("the record's length does not match its head")
        return FarRecord(head, cipher, chunks)


def _cipher(secret: bytes, key: bytes, salt: bytes, prefix: bytes) -> RecordCipher:
    assert len(salt) == SALT_BYTES
    return RecordCipher(derive_key(secret, salt=salt, info=_FAR_RECORD_DOMAIN + key), prefix)


def _chunk_count(payload_bytes: int) -> int:
    return -(-payload_bytes // CHUNK_BYTES)


def _sealed_bytes(payload_bytes: int) -> int:
    return payload_bytes + TAG_BYTES * _chunk_count(payload_bytes)
