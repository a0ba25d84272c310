"""Messages of SGLang's encoder protocol: requests from its language-only servers, and embeddings for them.

Requests are JSON, and are validated strictly. An embedding is sent to the server's ZMQ socket as two frames:

    header    a pickle, because SGLang 0.5.23 reads no other format
    payload   the embedding, C-contiguous, little-endian

This module never reads a pickle, and writes the header without Python's pickle module. The header is a fixed
sequence of opcodes of protocol 2 that creates one `EmbeddingData` with a dictionary of strings, integers and
lists. It refers to three globals: the class, the modality and the dtype. All three are on the allow list of
SGLang's unpickler (`sglang.srt.utils.common.SafeUnpickler`). SGLang ignores additional entries of the
dictionary.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from cornplug.encoder_service.wire.signed_claims import SignedClaim
from cornplug.errors import EncoderRefused

_RECEIVER: Final = "sglang.srt.disaggregation.encoder.receiver"
_MODALITY: Final = "sglang.srt.multimodal.modality"
_IMAGE: Final = 1
DTYPES: Final = ("float32", "float16", "bfloat16")

_RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Image of a request, with its options."""

    url: str
    detail: str | None = None
    """Level of detail from OpenAI's API. It has no effect, because the served families have one
    resolution."""
    content_hash: str | None = None
    """Hash of the content, as sent by the client. It is not used, because cache keys contain a digest of the
    pixels."""
    cornplug_salt: str | None = None
    """The request's `cache_salt`, from a server with cornplug's plugin (`sglang_hooks/media/epd.py`)."""
    cornplug_salt_proof: str | None = None
    """Proof that the server has the secret (`signed_claims.salt_proof`), so that it may set a salt."""


class EncodePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /encode, which requests to encode these images and send the embeddings as one part."""

    req_id: _RequestId
    modality: Literal["IMAGE", "VIDEO", "AUDIO"]
    mm_items: Annotated[list[str | MediaItem], msgspec.Meta(min_length=1, max_length=256)]
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    part_idx: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    prefill_host: _Host | None = None
    embedding_port: _Port | None = None
    """Port of the receiver on `prefill_host`. If None, receivers register themselves (`ReceiveAt`)."""
    encoder_idx: int = 0
    encoder_url: str = ""
    time_stats_json: Any = None


class ReceiveAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /scheduler_receive_url, which registers one of `receive_count` receivers of a part."""

    req_id: _RequestId
    receive_url: Annotated[str, msgspec.Meta(min_length=3, max_length=260)]
    """Address as host:port, with an IPv6 host in brackets."""
    receive_count: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    modality: str = "IMAGE"


def read_part(body: bytes) -> EncodePart:
    """Return the parsed request. Raises EncoderRefused("bad_input") if it is invalid."""
    try:
        part = msgspec.json.decode(body, type=EncodePart)
    except (msgspec.DecodeError, RecursionError) as e:
        raise EncoderRefused(str(e), reason="bad_input") from None
    if part.part_idx >= part.num_parts:
        raise EncoderRefused(f"part_idx: {part.part_idx} of {part.num_parts} parts", reason="bad_input")
    if (part.prefill_host is None) and part.embedding_port is not None:
        raise EncoderRefused("prefill_host: missing, but embedding_port is set", reason="bad_input")
    if part.modality != "IMAGE":
        raise EncoderRefused(f"modality: {part.modality} is not supported, only IMAGE", reason="bad_input")
    return part


def read_receiver(body: bytes) -> tuple[ReceiveAt, tuple[str, int]]:
    """Return the request and its (host, port). Raises EncoderRefused("bad_input") if it is invalid."""
    try:
        receiver = msgspec.json.decode(body, type=ReceiveAt)
    except (msgspec.DecodeError, RecursionError) as e:
        raise EncoderRefused(str(e), reason="bad_input") from None
    host, _, port = receiver.receive_url.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise EncoderRefused(f"receive_url: {receiver.receive_url!r} is not host:port", reason="bad_input")
    return receiver, (host.removeprefix("[").removesuffix("]"), int(port))


def items_of(part: EncodePart) -> list[MediaItem]:
    """Return the part's images as `MediaItem`s."""
    return [MediaItem(url=item) if isinstance(item, str) else item for item in part.mm_items]


def header(
    part: EncodePart,
    *,
    dtype: str,
    shape: tuple[int, int],
    grid: Sequence[Sequence[int]],
    statement: SignedClaim,
) -> bytes:
    """Return the first frame of the message that contains the embeddings of a part.

    Args:
        part: Request that the message answers.
        dtype: Dtype of the second frame.
        shape: (rows, hidden_size) of the second frame.
        grid: (frames, height, width) in patches for each image.
        statement: Signed claim about the second frame.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    fields: Mapping[str, bytes] = {
        "req_id": _text(part.req_id),
        "num_parts": _integer(part.num_parts),
        "part_idx": _integer(part.part_idx),
        "grid_dim": _list(_list(_integer(n) for n in row) for row in grid),
        "modality": _global(_MODALITY, "Modality") + _integer(_IMAGE) + b"\x85R",
        "embedding": b"N",
        "send_time": b"N",
        "dtype": _global("torch", dtype),
        "shape": _list(_integer(n) for n in shape),
        "error_msg": b"N",
        "error_code": b"N",
        **{name: _text(value) for name, value in statement.fields().items()},
    }
    # PROTO 2; class, (), NEWOBJ; {} filled between MARK and SETITEMS; BUILD; STOP.
    body = b"".join(_text(name) + value for name, value in fields.items())
    return b"\x80\x02" + _global(_RECEIVER, "EmbeddingData") + b")\x81}(" + body + b"ub."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode("ascii")


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _list(values: Any) -> bytes:
    return b"](" + b"".join(values) + b"e"
