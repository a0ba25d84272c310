"""Messages on the encoder's unix socket, and in the sealed bodies of `POST /v1/engine`. They are encoded as
msgpack, never as pickle.

A frame on the socket consists of a u32 little-endian length and one msgpack-encoded message. Large inputs of
a request are not in its frame, but in memory whose descriptor is sent with the frame (`engine_inputs.py`). A
client may have many requests in flight on one connection. Replies contain the request's id and arrive in any
order. The socket is for engines of the same user on the same host. First, both sides prove that they have the
shared secret. The service trusts that the embedding key in a request belongs to the request's inputs. Other
clients use HTTP, where the service computes every digest itself. `status_of` maps reasons to HTTP statuses.

    engine  ── Hello: version, nonce ───────────>  service
            <── Challenge: version, nonce, proof ──
            ── Proof ───────────────────────────>

A proof is an HMAC over the side's name and both nonces, which are new for each connection. Therefore recorded
messages cannot be replayed, and a side's proof cannot be sent back to it. Inputs and salts are sent only
after both proofs have been checked. Each side also checks the user of the other process, which the kernel
reports (`foreign_peer_uid`). Therefore another user cannot relay proofs between engine and service.

Releases of an engine may decode images differently. Therefore a message names the rule by which the service
decodes an image (`Decoding`, `formats.image`), which is the rule of the engine that will use the embedding.
This module does not need torch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec

from cornplug.checkpoints.families import Modality
from cornplug.errors import EncoderUnavailable
from cornplug.local_socket import foreign_peer_uid

PROTOCOL_VERSION: Final = 4
MAX_FRAME_BYTES: Final = 256 << 20
MAX_REQUEST_FRAME_BYTES: Final = 512 << 10
"""Maximum bytes of a request's frame on the socket, without the inputs in shared memory. The service decodes
requests on its event loop."""
MAX_SHARED_BYTES: Final = 256 << 20
"""Maximum bytes of a request's inputs in shared memory."""
_TRACE_MAX: Final = 512
_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
_TraceHeaders = Annotated[dict[str, str], msgspec.Meta(max_length=8)]

# In requests, the size of every list and map is limited. Otherwise a sender could fill a list with hundreds
# of millions of values. Unknown fields are refused, so a new field requires a new PROTOCOL_VERSION.
MAX_HANDSHAKE_BYTES: Final = 1024
"""Maximum bytes of a frame that is read before the peer has proved that it has the secret."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""Maximum duration of a handshake in seconds."""
_NONCE_BYTES: Final = 32
_HANDSHAKE_DOMAIN: Final = b"cornplug/encoder-socket/1/"
Decoding = Literal["vllm-0.32", "vllm-0.33", "sglang-0.5.23"]
"""Decoding rule of an engine, named after the release that introduced the rule."""
DECODINGS: Final[tuple[Decoding, ...]] = get_args(Decoding)
DEFAULT_DECODING: Final[Decoding] = "vllm-0.33"
"""Rule for requests to the HTTP API that do not name a rule."""
DECODING_HEADER: Final = "x-cornplug-decoding"
"""HTTP header that names the rule for all images in a request."""
_RELEASES: Final[tuple[tuple[str, str, Decoding], ...]] = (
    ("vllm", "0.32.", "vllm-0.32"),
    ("vllm", "0.33.", "vllm-0.33"),
    ("sglang", "0.5.23", "sglang-0.5.23"),
)
_STATUS: Final[Mapping[str, int]] = {
    "unknown_model": 404,
    "bad_input": 422,
    "overloaded": 503,
    "over_share": 429,
    "too_late": 504,
    "internal": 500,
    "too_large": 413,
    "too_large_prepared": 413,
    "too_many_pixels": 413,
    "slow_body": 408,
    "media_type": 415,
    "not_found": 404,
    "method_not_allowed": 405,
    "draining": 503,
    "down": 503,
    "stuck": 503,
    "remote_url": 422,
    "remote_failed": 424,
    "remote_timeout": 424,
    "fetches_full": 503,
    "unauthorized": 401,
    "forbidden": 403,
    "forbidden_salt": 403,
    "forbidden_origin": 403,
    "forbidden_host": 421,
    "not_reloaded": 409,
    "forbidden_receiver": 403,
    "undeliverable": 502,
    "no_receiver": 504,
    "transfer": 501,
}
_MEDIA_STATUSES: Final = frozenset({413, 415, 422, 424})
FETCH_REASONS: Final = frozenset({"remote_failed", "remote_timeout", "fetches_full"})
"""Reasons after which another service may succeed, because it has another network route to the URL's host."""
INTERNAL_ERROR_MESSAGE: Final = "internal error of the service; see its log"
"""Message for an internal error. It does not contain the exception's text, which may include paths, addresses
and data of other clients."""


class WireTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """C-contiguous little-endian tensor. `dtype` is the name of the torch dtype without the "torch."
    prefix."""

    dtype: str
    shape: _Shape
    data: bytes
    """The tensor's bytes. In a message that this process sends, or whose inputs are in shared memory, this
    can be a memoryview of single bytes."""


class SharedInput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Dtype, shape and location of a tensor in the memory that is sent with a request."""

    dtype: str
    shape: _Shape
    offset: int
    size_bytes: int


_SharedInputs = Annotated[dict[str, SharedInput], msgspec.Meta(max_length=64)]
_Inputs = Annotated[dict[str, WireTensor], msgspec.Meta(max_length=64)]


class DescribeRequest(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """Request for the list of served models."""

    version: int = PROTOCOL_VERSION


class ServedModality(msgspec.Struct, frozen=True):
    """One modality of a model. Each modality has its own processor and therefore its own model identity."""

    name: str
    """ "image", "video" or "audio"."""
    identity: bytes
    spec_fp: bytes


class ServedModel(msgspec.Struct, frozen=True):
    """One served model with the fingerprints of its parts, 32 bytes each."""

    name: str
    family: str
    identity: bytes
    """Identity of the model for its first modality, computed from the three fields below
    (`cornplug.identity.model_identity`).
    """
    tower_fp: bytes
    projector_fp: bytes
    spec_fp: bytes
    dtype: str
    hidden_size: int
    """Width of an embedding row, as the LLM receives it."""
    modalities: tuple[ServedModality, ...] = ()
    """All modalities of the model, in the order of its family."""
    epoch: int = 0
    """Number of times that the model's weights were reloaded since the service started."""

    def identity_for(self, modality: str) -> bytes | None:
        """Return the model identity for a modality, or None if the model does not support it."""
        return next((m.identity for m in self.modalities if m.name == modality), None)


class DescribeReply(msgspec.Struct, frozen=True, tag="described"):
    """Reply to `DescribeRequest`."""

    version: int
    models: tuple[ServedModel, ...]


class EncodeRequest(msgspec.Struct, frozen=True, tag="encode", forbid_unknown_fields=True):
    """Request to encode one media item, which the engine has already preprocessed with its own processor."""

    id: int
    identity: bytes
    key: bytes
    """Embedding key under which the result is saved."""
    cache_salt: str | None
    inputs: _Inputs
    """Outputs of the processor, by their Hugging Face names, such as `pixel_values` and `image_grid_thw`."""
    app: str
    deadline_s: float
    """Seconds from the receipt of the request after which the engine no longer waits for the reply."""
    trace: _TraceHeaders | None = None
    """Headers `traceparent` and `tracestate` (W3C) of the client's request to the engine, or None."""
    shared: _SharedInputs = {}
    """Further inputs, which are in the memory whose descriptor was sent with this request's frame. Only on
    the unix socket."""


class EncodeReply(msgspec.Struct, frozen=True, tag="encoded"):
    """Reply with an embedding of shape (rows, hidden_size)."""

    id: int
    key: bytes
    origin: Literal["computed", "coalesced", "cached"]
    """How the service obtained the embedding: "computed" for this request, "coalesced" with another request
    in flight, or "cached" (the embedding or its features)."""
    stored: bool
    """Whether the store has the embedding under `key`. If false, `tensor` contains it."""
    tensor: WireTensor | None
    service_time_s: float
    """Seconds from the receipt of the request to the reply."""


class EncodeRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Reply that refuses an `EncodeRequest`. `reason` is used as a metric label (see EncoderRefused)."""

    id: int
    reason: Literal["unknown_model", "bad_input", "overloaded", "over_share", "too_late", "internal"]
    message: str
    retry_after_s: float | None = None


class MediaRequest(msgspec.Struct, frozen=True, tag="medium", forbid_unknown_fields=True):
    """Request from an engine without a tower to encode one media item. It is sent only over HTTP. The service
    fetches and decodes the item."""

    identity: bytes
    """Model identity of the engine's model for this modality."""
    modality: Modality
    data: bytes
    """Bytes of the item's file. Empty if `url` is set."""
    url: str
    """URL of the item (http or https), or "" if `data` contains the file. The service fetches the URL only if
    its own rules allow it."""
    cache_salt: str | None
    app: str
    deadline_s: float
    """Seconds from the receipt of the request after which the engine no longer waits for the reply."""
    decoding: str = "vllm-0.32"
    """Name of the rule by which an image is decoded (`Decoding`). It depends on the engine's release. The
    default applies to engines that do not send this field.
    """


class MediaReply(msgspec.Struct, frozen=True, tag="medium_encoded"):
    """Reply to a `MediaRequest`: an embedding of shape (rows, hidden_size), and signed claims about it."""

    handle: str
    """Text of an `engine_seal.EmbeddingHandle` with identity, media digest, key and patch grid."""
    tensor: WireTensor
    decoding: str = "vllm-0.32"
    """Name of the rule by which an image was decoded. The default applies to services that do not send this
    field."""


class MediaRefusal(msgspec.Struct, frozen=True, tag="medium_refused"):
    """Reply that refuses a `MediaRequest`. `reason` is either a key of `_STATUS` or the reason of a
    MediaError."""

    reason: str
    message: str
    retry_after_s: float | None = None


Request = DescribeRequest | EncodeRequest


Reply = DescribeReply | EncodeReply | EncodeRefusal


HttpRequest = Request | MediaRequest


HttpReply = Reply | MediaReply | MediaRefusal
"""Reply to an `HttpRequest`, which `POST /v1/engine` returns."""


def trace_of(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the trace headers in a request's headers (names in lower case), or None without `traceparent`.

    By W3C Trace Context, a `tracestate` of up to 512 characters must be passed on. A longer `tracestate` may
    be dropped.
    """
    found = {name: (headers or {}).get(name, "") for name in ("traceparent", "tracestate")}
    kept = {name: value for name, value in found.items() if 0 < len(value) <= _TRACE_MAX}
    return kept if "traceparent" in kept else None


def decoding_of(engine: str, version: str) -> Decoding | None:
    """Return the rule of a release of "vllm" or "sglang", or None for a release that is not listed."""
    return next((d for e, start, d in _RELEASES if e == engine and version.startswith(start)), None)


def parse_decoding(name: str) -> Decoding | None:
    """Return the rule with this name, or None."""
    return next((d for d in DECODINGS if d == name), None)


def status_of(reason: str) -> int:
    """Return the HTTP status for a refusal reason. Reasons without their own status are about the media item,
    and get status 422."""
    return _STATUS.get(reason, 422)


def is_media_refusal(reason: str) -> bool:
    """Return whether the media item causes a refusal, so that neither another service nor a retry helps."""
    return status_of(reason) in _MEDIA_STATUSES


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
            raise UntrustedPeer("the proof was made with a different secret")


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
    return hmac.digest(
        secret, _HANDSHAKE_DOMAIN + side + b"\0" + engine_nonce + service_nonce, hashlib.sha256
    )


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
