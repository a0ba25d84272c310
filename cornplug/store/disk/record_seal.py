"""Seals records with AES-256-GCM under keys of the sharing domain's secret.

A record outlives the process that wrote it, and lies where others may change it: the seal binds it to the
secret. Each record has a key of its own, HKDF-SHA256(secret, salt of the record, domain name | entry's key),
so nonces can be numbers, and no two records of one entry share a key and a nonce. Only a store with a disk
needs the package "cryptography": it is imported at the first use.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from cornplug.store.disk.record_format import SALT_BYTES, TAG_BYTES

_RECORD_DOMAIN: Final = b"cornplug disk record 1"
_HEADER_DOMAIN: Final = b"cornplug disk header 1"
_KEY_BYTES: Final = 32
_META_NUMBER: Final = 0


class RecordDamaged(Exception):
    """Sealed bytes are not those that this secret has sealed."""


def new_salt() -> bytes:
    """A new record's salt."""
    return secrets.token_bytes(SALT_BYTES)


class RecordSealer:
    """Keys of one secret. Its calls may come from any thread."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._header_key = derive_key(secret, salt=None, info=_HEADER_DOMAIN)

    def header_tag(self, body: bytes) -> bytes:
        """The tag of a record's header."""
        return hashlib.blake2b(body, key=self._header_key, digest_size=TAG_BYTES).digest()

    def cipher(self, key: bytes, salt: bytes, header: bytes) -> RecordCipher:
        """The cipher of one record; `header` are its bytes with state 0."""
        return RecordCipher(derive_key(self._secret, salt=salt, info=_RECORD_DOMAIN + key), header)


class RecordCipher:
    """Seals and opens the pieces of one record. Long calls run without the interpreter's lock."""

    def __init__(self, key: bytes, header: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._header, self._damaged = AESGCM(key), header, InvalidTag

    def seal_meta(self, meta: bytes) -> bytes:
        """The sealed header of the entry."""
        return self._cipher.encrypt(_nonce(_META_NUMBER), meta, self._header)

    def open_meta(self, sealed: bytes | memoryview) -> bytes:
        """Raises RecordDamaged."""
        try:
            return self._cipher.decrypt(_nonce(_META_NUMBER), sealed, self._header)
        except self._damaged as e:
            raise RecordDamaged from e

    def seal_chunk(self, number: int, payload: memoryview, into: memoryview) -> None:
        """Seal a chunk of the payload; `into` has TAG_BYTES more."""
        self._cipher.encrypt_into(_nonce(1 + number), payload, self._header, into)

    def open_chunk(self, number: int, sealed: memoryview, into: memoryview) -> None:
        """Open a chunk into the payload's room. Raises RecordDamaged; the room then has any bytes."""
        try:
            self._cipher.decrypt_into(_nonce(1 + number), sealed, self._header, into)
        except self._damaged as e:
            raise RecordDamaged from e


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def derive_key(secret: bytes, *, salt: bytes | None, info: bytes) -> bytes:
    """A key of the secret for one purpose, which `info` names."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _KEY_BYTES, salt, info).derive(secret)
