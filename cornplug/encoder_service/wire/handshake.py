"""Handshake on the engines' unix socket, in which each side proves that it has the shared secret.

    engine  ── Hello: version, nonce ───────────>  service
            <── Challenge: version, nonce, proof ──
            ── Proof ───────────────────────────>

A proof is an HMAC over the side's name and both nonces, which are new for each connection. Therefore recorded
messages cannot be replayed, and a side's proof cannot be sent back to it. Inputs and salts are sent only
after both proofs have been checked. Each side also checks the user of the other process, which the kernel
reports (`foreign_peer_uid`). Therefore another user cannot relay proofs between engine and service. This
module does not need torch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from typing import Final

import msgspec

from cornplug.encoder_service.wire.messages import PROTOCOL_VERSION
from cornplug.errors import EncoderUnavailable
from cornplug.local_socket import foreign_peer_uid

MAX_HANDSHAKE_BYTES: Final = 1024
"""Maximum bytes of a frame that is read before the peer has proved that it has the secret."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""Maximum duration of a handshake in seconds."""
_NONCE_BYTES: Final = 32
_DOMAIN: Final = b"cornplug/encoder-socket/1/"


class EngineHello(msgspec.Struct, frozen=True, tag="hello"):
    """First message, which the engine sends."""

    version: int
    nonce: bytes


class ServiceChallenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Second message, in which the service sends its proof and a nonce for the engine's proof."""

    version: int
    nonce: bytes
    proof: bytes


class EngineProof(msgspec.Struct, frozen=True, tag="proof"):
    """Third message, in which the engine sends its proof. The engine may send requests immediately after this
    message."""

    proof: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(EngineHello).decode
_decode_challenge = msgspec.msgpack.Decoder(ServiceChallenge).decode
_decode_proof = msgspec.msgpack.Decoder(EngineProof).decode


class UntrustedPeer(ValueError):
    """Raised if the peer has not proved that it has the secret."""


class EngineHandshake:
    """Engine side of one handshake."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    def create_hello(self) -> bytes:
        """Return the first frame to send, an `EngineHello`."""
        return _encode(EngineHello(version=PROTOCOL_VERSION, nonce=self._nonce))

    def create_proof(self, frame: bytes) -> bytes:
        """Check the service's proof in the `ServiceChallenge` in `frame`. Return the frame with this engine's
        proof.

        Raises msgspec's errors if the frame contains another message. Raises
        EncoderUnavailable("encoder_version"), or EncoderUnavailable("encoder_untrusted") if the proof is
        invalid.
        """
        challenge = _decode_challenge(frame)
        if challenge.version != PROTOCOL_VERSION:
            raise EncoderUnavailable(
                f"the service uses protocol version {challenge.version}, this client {PROTOCOL_VERSION}",
                reason="encoder_version",
            )
        _check_service_proof(challenge.proof, self._secret, b"service", self._nonce, challenge.nonce)
        return _encode(
            EngineProof(proof=_compute_proof(self._secret, b"engine", self._nonce, challenge.nonce))
        )


class ServiceHandshake:
    """Service side of one handshake."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._engine_nonce = b""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    def create_challenge(self, frame: bytes) -> bytes:
        """Return the reply to the `EngineHello` in `frame`.

        Raises UntrustedPeer if the nonce is invalid, and msgspec's errors if the frame contains another
        message.
        """
        hello = _decode_hello(frame)
        if len(hello.nonce) != _NONCE_BYTES:
            raise UntrustedPeer(f"invalid nonce of {len(hello.nonce)} bytes")
        self._engine_nonce = hello.nonce
        proof = _compute_proof(self._secret, b"service", hello.nonce, self._nonce)
        return _encode(ServiceChallenge(version=PROTOCOL_VERSION, nonce=self._nonce, proof=proof))

    def check_proof(self, frame: bytes) -> None:
        """Check the engine's proof in `frame`.

        Raises UntrustedPeer if the proof is invalid, and msgspec's errors if the frame contains another
        message.
        """
        if not hmac.compare_digest(
            _decode_proof(frame).proof,
            _compute_proof(self._secret, b"engine", self._engine_nonce, self._nonce),
        ):
            raise UntrustedPeer("the proof was made with another secret")


def check_user(sock: socket.socket) -> None:
    """Raise EncoderUnavailable("encoder_untrusted") unless the peer is a process of this user."""
    if (uid := foreign_peer_uid(sock)) is not None:
        raise EncoderUnavailable(
            f"the socket belongs to user {uid}, not to user {os.getuid()}; set encoder.socket to a path "
            "in a folder of this user",
            reason="encoder_untrusted",
        )


def _compute_proof(secret: bytes, side: bytes, engine_nonce: bytes, service_nonce: bytes) -> bytes:
    # Both nonces have the same length, and a side's name ends with a zero byte. Therefore different arguments
    # never result in the same bytes.
    return hmac.digest(secret, _DOMAIN + side + b"\0" + engine_nonce + service_nonce, hashlib.sha256)


def _check_service_proof(
    proof: bytes, secret: bytes, side: bytes, engine_nonce: bytes, service_nonce: bytes
) -> None:
    if len(service_nonce) != _NONCE_BYTES or not hmac.compare_digest(
        proof, _compute_proof(secret, side, engine_nonce, service_nonce)
    ):
        raise EncoderUnavailable(
            "the service uses another store.secret_file; use the same file for engine and service",
            reason="encoder_untrusted",
        )
