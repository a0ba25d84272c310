"""Messages on the encoder's unix socket: length-prefixed msgpack, never pickle.

Frame: u32 little-endian length, then one msgpack-encoded message. A client may have many requests in flight
on one connection. Replies contain the request's id and arrive in any order. The socket is for engines of the
same user on the same host that have the shared secret, which both sides prove first (`handshake`). The
service trusts that their embedding keys belong to the inputs in the message. Other clients use HTTP, where
the service computes every digest itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from cornplug.checkpoints.families import Modality

PROTOCOL_VERSION: Final = 3
MAX_FRAME_BYTES: Final = 256 << 20
_TRACE_MAX: Final = 512
_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
_TraceHeaders = Annotated[dict[str, str], msgspec.Meta(max_length=8)]

# In requests every list and map is bounded, because a sender may fill it with hundreds of millions of values.
# An unknown field is refused, not skipped. A new field needs a new PROTOCOL_VERSION.


class WireTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """C-contiguous little-endian tensor. `dtype` is torch's name without "torch."."""

    dtype: str
    shape: _Shape
    data: bytes


_Inputs = Annotated[dict[str, WireTensor], msgspec.Meta(max_length=64)]


class DescribeRequest(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """Request for the list of served models."""

    version: int = PROTOCOL_VERSION


class ServedModality(msgspec.Struct, frozen=True):
    """One modality of a model. Each has its own processor and therefore its own model identity."""

    name: str
    """ "image", "video" or "audio"."""
    identity: bytes
    spec_fp: bytes


class ServedModel(msgspec.Struct, frozen=True):
    """One served model with the fingerprints of its parts, 32 bytes each."""

    name: str
    family: str
    identity: bytes
    """Model identity of the model's first modality, computed from the three fields below
    (`cornplug.identity.model_identity`).
    """
    tower_fp: bytes
    projector_fp: bytes
    spec_fp: bytes
    dtype: str
    hidden_size: int
    """Width of an embedding row, as the LLM consumes it."""
    modalities: tuple[ServedModality, ...] = ()
    """All modalities of the model, in the order of its family."""
    epoch: int = 0
    """Number of reloads of its weights since the service started."""

    def identity_for(self, modality: str) -> bytes | None:
        """Return the model identity for a modality, or None if the model does not support it."""
        return next((m.identity for m in self.modalities if m.name == modality), None)


class DescribeReply(msgspec.Struct, frozen=True, tag="described"):
    """Reply to `DescribeRequest`."""

    version: int
    models: tuple[ServedModel, ...]


class EncodeRequest(msgspec.Struct, frozen=True, tag="encode", forbid_unknown_fields=True):
    """Request to encode one medium from the outputs of the engine's own processor."""

    id: int
    identity: bytes
    key: bytes
    """Embedding key under which the result is saved."""
    cache_salt: str | None
    inputs: _Inputs
    """Processor outputs of one item by their Hugging Face names: `pixel_values`, `image_grid_thw`."""
    app: str
    deadline_s: float
    """Seconds from receipt after which the client no longer waits for the reply."""
    trace: _TraceHeaders | None = None
    """W3C `traceparent` and `tracestate` of the client's request, if any."""


class EncodeReply(msgspec.Struct, frozen=True, tag="encoded"):
    """Reply with an embedding of shape (rows, hidden_size)."""

    id: int
    key: bytes
    origin: Literal["computed", "coalesced", "cached"]
    """"computed" for this request, "coalesced" with another request in flight, or "cached" features."""
    stored: bool
    """Whether the store has it under `key`. If false, `tensor` contains it."""
    tensor: WireTensor | None
    service_time_s: float
    """Seconds from receipt to reply."""


class EncodeRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal to encode. `reason` is a metric label (see EncoderRefused)."""

    id: int
    reason: Literal["unknown_model", "bad_input", "overloaded", "over_share", "too_late", "internal"]
    message: str
    retry_after_s: float | None = None


class MediumRequest(msgspec.Struct, frozen=True, tag="medium", forbid_unknown_fields=True):
    """Request of an engine without a tower to encode one medium, over HTTP. The service fetches and decodes
    it."""

    identity: bytes
    """Model identity of the engine's tower, for which the rows are requested."""
    modality: Modality
    data: bytes
    """The medium's file, empty if `url` is set."""
    url: str
    """An http(s) URL, fetched by the service's own rules, or "" if `data` contains the file."""
    cache_salt: str | None
    app: str
    deadline_s: float
    """Seconds from receipt after which the client no longer waits for the reply."""
    decoding: str = "vllm-0.32"
    """Name of the rule by which the image is decoded (`decodings`): the rule of the engine's release. The
    default is the rule of peers that do not have the field.
    """


class MediumReply(msgspec.Struct, frozen=True, tag="medium_encoded"):
    """Reply with the rows of a medium, shape (rows, hidden_size), and the signed claims about them."""

    handle: str
    """Text of an `embedding_handle.EmbeddingHandle`: identity, media digest, key and patch grid."""
    tensor: WireTensor
    decoding: str = "vllm-0.32"
    """Name of the rule by which the image was decoded. The default is the rule of services that do not have
    the field."""


class MediumRefusal(msgspec.Struct, frozen=True, tag="medium_refused"):
    """Refusal to encode a medium. `reason` is any of `status_codes`, or a reason of the medium."""

    reason: str
    message: str
    retry_after_s: float | None = None


Request = DescribeRequest | EncodeRequest
Reply = DescribeReply | EncodeReply | EncodeRefusal

HttpRequest = Request | MediumRequest
HttpReply = Reply | MediumReply | MediumRefusal
"""Messages of `POST /v1/engine`."""


def trace_of(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the trace headers of a request (names in lower case), or None without `traceparent`.

    W3C Trace Context: a `tracestate` of up to 512 characters must be passed on. A longer one may be dropped.
    """
    found = {name: (headers or {}).get(name, "") for name in ("traceparent", "tracestate")}
    kept = {name: value for name, value in found.items() if 0 < len(value) <= _TRACE_MAX}
    return kept if "traceparent" in kept else None
