"""Names and format of far records. Names and records reveal no content, app or tenant to the far store's
operator.

    name      "cp1/" and HMAC-SHA256(key of names, entry's key) in hex
    record    magic "CPFR" | u16 version | 4-byte id of the sealing secret | 16-byte salt |
              u32 bytes of the sealed head | sealed head | sealed chunk of the payload ...

All integers are little-endian. The head is msgpack. It has the app, seconds of recomputation, time of writing
(Unix), size of the payload in bytes, and the entry's header ("meta"). Each sealed piece consists of
AES-256-GCM ciphertext and 16 bytes of tag. The associated data is all bytes before the head, the nonce is the
number of the piece, and the encryption key is HKDF-SHA256(sealing secret, salt, domain name | entry's key).
So a record that was put under another name, truncated or changed cannot be opened. An older record of the
same key has the same content, because keys are digests of the content.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cornplug.store.disk.record_format import (
    CHUNK_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    RecordCipher,
    RecordDamaged,
    derive_key,
    new_salt,
)

_NAME_DOMAIN: Final = b"cornplug far name 1"
_RECORD_DOMAIN: Final = b"cornplug far record 1"
_SECRET_DOMAIN: Final = b"cornplug far secret 1"
_PREFIX: Final = struct.Struct("<4sH4s16sI")
_MAGIC: Final = b"CPFR"
_VERSION: Final = 2
_MAX_HEAD_BYTES: Final = 1 << 24


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """Sealed description of an entry."""

    app: str
    cost_s: float
    written_s: float
    """Unix time at which the entry was written."""
    payload_bytes: int
    meta: bytes


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RecordHead)


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
        return _PREFIX.size + len(_encoder.encode(head)) + TAG_BYTES + _sealed_bytes(head.payload_bytes)

    def seal(self, key: bytes, head: RecordHead, payload: memoryview) -> bytes:
        """Return the sealed record of an entry."""
        salt, body = new_salt(), _encoder.encode(head)
        prefix = _PREFIX.pack(_MAGIC, _VERSION, self._newest_id, salt, len(body) + TAG_BYTES)
        cipher = _cipher(self._secrets_by_id[self._newest_id], key, salt, prefix)
        record = bytearray(_PREFIX.size + len(body) + TAG_BYTES + _sealed_bytes(payload.nbytes))
        at = _PREFIX.size + len(body) + TAG_BYTES
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
        if len(record) < _PREFIX.size:
            raise RecordDamaged("the record is too short")
        magic, version, sealed_by, salt, head_bytes = _PREFIX.unpack_from(record)
        end = _PREFIX.size + head_bytes
        if (magic, version) != (_MAGIC, _VERSION) or not TAG_BYTES <= head_bytes <= _MAX_HEAD_BYTES:
            raise RecordDamaged("the bytes are not a record of this format")
        secret = self._secrets_by_id.get(sealed_by)
        if secret is None:
            raise RecordDamaged("the record is sealed with a secret that this host does not have")
        data = memoryview(record)
        cipher = _cipher(secret, key, salt, record[: _PREFIX.size])
        try:
            head = _decoder.decode(cipher.open_meta(data[_PREFIX.size : end]))
        except msgspec.MsgspecError as e:
            raise RecordDamaged("the record's head has the format of another release") from e
        chunks = data[end:]
        if head.payload_bytes < 0 or chunks.nbytes != _sealed_bytes(head.payload_bytes):
            raise RecordDamaged("the record's length does not match its head")
        return FarRecord(head, cipher, chunks)


def _cipher(secret: bytes, key: bytes, salt: bytes, prefix: bytes) -> RecordCipher:
    assert len(salt) == SALT_BYTES
    return RecordCipher(derive_key(secret, salt=salt, info=_RECORD_DOMAIN + key), prefix)


def _chunk_count(payload_bytes: int) -> int:
    return -(-payload_bytes // CHUNK_BYTES)


def _sealed_bytes(payload_bytes: int) -> int:
    return payload_bytes + TAG_BYTES * _chunk_count(payload_bytes)
