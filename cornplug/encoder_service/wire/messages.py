"""Messages on the encoder's unix socket, and in the sealed bodies of `POST /v1/engine`. They are encoded as
msgpack, never as pickle.

A frame on the socket consists of a u32 little-endian length and one msgpack-encoded message. A client may
have many requests in flight on one connection. Replies contain the request's id and arrive in any order. The
socket is for engines of the same user on the same host. First, both sides prove that they have the shared
secret (`handshake`). The service trusts that the embedding key in a request belongs to the request's inputs.
Other clients use HTTP, where the service computes every digest itself. `status_of` maps reasons to HTTP
statuses.

Releases of an engine may decode images differently. Therefore a message names the rule by which the service
decodes an image (`Decoding`, `media.image`), which is the rule of the engine that will use the embedding.
This module does not need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec

from cornplug.checkpoints.families import Modality

PROTOCOL_VERSION: Final = 3
MAX_FRAME_BYTES: Final = 256 << 20
_TRACE_MAX: Final = 512
_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
_TraceHeaders = Annotated[dict[str, str], msgspec.Meta(max_length=8)]

# In requests, the size of every list and map is limited. Otherwise a sender could fill a list with hundreds
# of millions of values. Unknown fields are refused, so a new field requires a new PROTOCOL_VERSION.


class WireTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """C-contiguous little-endian tensor. `dtype` is the name of the torch dtype without the "torch."
    prefix."""

    dtype: str
    shape: _Shape
    data: bytes


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
    """Text of an `embedding_file.EmbeddingHandle` with identity, media digest, key and patch grid."""
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


def decoding_of(engine: str, version: str) -> Decoding | None:
    """Return the rule of a release of "vllm" or "sglang", or None for a release that is not listed."""
    return next((d for e, start, d in _RELEASES if e == engine and version.startswith(start)), None)


def parse_decoding(name: str) -> Decoding | None:
    """Return the rule with this name, or None."""
    return next((d for d in DECODINGS if d == name), None)


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


def status_of(reason: str) -> int:
    """Return the HTTP status for a refusal reason. Reasons without their own status are about the media item,
    and get status 422."""
    return _STATUS.get(reason, 422)


def is_media_refusal(reason: str) -> bool:
    """Return whether the media item causes a refusal, so that neither another service nor a retry helps."""
    return status_of(reason) in _MEDIA_STATUSES
