"""Messages between a client and the daemon, each in a frame of `cornplug/local_socket.py`.

    greetings     one msgpack message, of any version: `ClientHello`, `DaemonWelcome`, `ClientRejected`
    all others    u32 number | one msgpack message; an answer has its request's number

One request, one reply (but for `ReleaseRequest` and `RecallRequest`), in order. A client that no longer waits
for an answer knows it by its number when it comes. No request and no answer is large: the client cuts its
requests (`MAX_KEYS`), the daemon its answers (`LeaseReply`), so that no client waits for another's. Keys
travel joined into one blob: 256 of them decode as one object instead of 256. Bytes of payloads never
travel; the arena and its tables do, once, as file descriptors beside `DaemonWelcome`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from cornplug import local_socket
from cornplug.config import STORE_PROTOCOL
from cornplug.errors import ProtocolError
from cornplug.store.base import KEY_BYTES, PurgeCount, PurgeRule, Reservation, WriterPart
from cornplug.store.store_stats import StoreStat

T = TypeVar("T")

PROTOCOL_VERSION: Final = STORE_PROTOCOL
MAX_FRAME_BYTES: Final = 16 << 20
MAX_LOOKUP_KEYS: Final = 8192
"""Keys of one `ContainsRequest`; about half a millisecond of the daemon's time."""
MAX_KEYS: Final = 1024
"""Keys of any other request; a few milliseconds."""
MAX_TOKENS: Final = 16
"""Tokens of a `ReleaseRequest`: the leases of a whole `TakeLeases` may have the same."""
CUT_LOOKS: Final = 1024
"""Room for no further key is looked for once so many entries were looked at for those before."""
BATCH_BYTES: Final = 1 << 20
"""An answer or a `CommitRequest` grows no further once it is as large as this."""
ALERT_S: Final = 150e-6
"""How long the daemon looks for the next request before it sleeps. Waking a sleeping core costs
more than any answer, and a client that reserves soon commits."""
NUMBER: Final = struct.Struct("<I")


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a client. `secret_tag` is the first 8 bytes of SHA-256 of the secret."""

    version: int
    secret_tag: bytes


class ContainsRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    keys: bytes


class TakeLeases(msgspec.Struct, frozen=True, array_like=True, tag=2):
    keys: bytes
    ttl_s: float


class ReserveRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    keys: bytes
    sizes: list[int]
    app: str
    part: WriterPart | None = None
    only_seen: bool = False
    cost_s: float = 0.0
    """Of one entry. A daemon without namespaces passes over it, and one of an older release."""


class CommitRequest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    tokens: list[int]
    metas: list[bytes]


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Without an answer: a reader of one entry would wait as long for it as for a quarter of a MiB. The same
    client's next request sees it done."""

    tokens: list[int]


class DeleteRequest(msgspec.Struct, frozen=True, array_like=True, tag=6):
    keys: bytes


class StatRequest(msgspec.Struct, frozen=True, array_like=True, tag=7):
    pass


class PurgeRequest(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A portion of a purge: the client asks again while the answer says `more`."""

    rule: PurgeRule
    begins: bool


class RecallRequest(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Without an answer: the table of entries shows which ones have come, and the ticket once far stores have
    answered for the absent ones."""

    keys: bytes
    ticket: Annotated[int, msgspec.Meta(ge=0)] = 0
    """By chance, of the client's; 0: none. A daemon of an older release passes over it."""


class DaemonWelcome(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Answer to `ClientHello`; the file descriptors of the arena, of its write fences, of the table of its
    entries and of the notes of reads come with it."""

    arena_id: bytes
    capacity_bytes: int
    notes_page: int
    """Where this client notes its reads (`use_notes.py`); -1: nowhere, it asks."""


class ContainsReply(msgspec.Struct, frozen=True, array_like=True, tag=11):
    mask: bytes


class LeaseReply(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Of the first so many keys, at least one: the answer is cut where it would grow large."""

    token: int
    """Of all these leases; 0 where no key is present."""
    metas: list[bytes | None]
    """None where the key is absent."""
    places: bytes
    """As `Leases.places`."""


class ReserveReply(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A reservation, or the value of a `Refusal`, for each of the first so many keys, at least one:
    the answer is cut where making room takes long."""

    answers: list[Reservation | str]


class CommitReply(msgspec.Struct, frozen=True, array_like=True, tag=14):
    done: list[bool]


class DeleteReply(msgspec.Struct, frozen=True, array_like=True, tag=16):
    count: int


class StatReply(msgspec.Struct, frozen=True, array_like=True, tag=17):
    stat: StoreStat


class ClientRejected(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """The daemon will not talk to this client; it closes the connection after this."""

    reason: Literal["version", "secret"]
    message: str


class RequestFault(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """The daemon will not do this request, and has not; the connection goes on."""

    message: str


class PurgeReply(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Of this portion."""

    count: PurgeCount
    more: bool


Request = (
    ClientHello
    | ContainsRequest
    | TakeLeases
    | ReserveRequest
    | CommitRequest
    | ReleaseRequest
    | DeleteRequest
    | StatRequest
    | PurgeRequest
    | RecallRequest
)
Reply = (
    DaemonWelcome
    | ContainsReply
    | LeaseReply
    | ReserveReply
    | CommitReply
    | DeleteReply
    | StatReply
    | PurgeReply
    | ClientRejected
    | RequestFault
)

_encoder: Final = msgspec.msgpack.Encoder()
request_decoder: Final = msgspec.msgpack.Decoder(Request)
reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def secret_tag(secret: bytes) -> bytes:
    """The 8 bytes by which both sides see whether they have the same secret; else they share nothing."""
    return hashlib.sha256(secret).digest()[:8]


def frame(message: Request | Reply, number: int | None = None) -> bytes:
    """A message as it goes over the socket. Raises ValueError when it exceeds MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if number is not None:
        body = NUMBER.pack(number) + body
    return local_socket.frame(body, limit=MAX_FRAME_BYTES)


def batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in portions of at most `most`; one empty portion of none, so that there is a request."""
    for start in range(0, max(len(items), 1), most):
        yield items[start : start + most]


def commit_batches(
    written: Sequence[tuple[Reservation, bytes]],
) -> Iterator[Sequence[tuple[Reservation, bytes]]]:
    """Portions of at most MAX_KEYS, and of about BATCH_BYTES."""
    start = size = 0
    for at, (_, meta) in enumerate(written):
        size += len(meta)
        if at > start and (size > BATCH_BYTES or at - start == MAX_KEYS):
            yield written[start:at]
            start, size = at, len(meta)
    yield written[start:]


def check_count(count: int, most: int = MAX_KEYS) -> None:
    """Raises ValueError for more keys or tokens than one request may have."""
    if count > most:
        raise ValueError(f"{count} keys or tokens in one request, at most {most}")


def split_keys(blob: bytes, most: int = MAX_KEYS) -> list[bytes]:
    """Joined keys apart. Raises ValueError when it is no whole number of them, or more than `most`."""
    if len(blob) % KEY_BYTES:
        raise ValueError(f"{len(blob)} bytes are no whole number of keys")
    check_count(len(blob) // KEY_BYTES, most)
    # Five times as fast as slicing in a loop.
    return list(struct.unpack(f"{KEY_BYTES}s" * (len(blob) // KEY_BYTES), blob))


def take_number(body: bytes) -> tuple[int, memoryview]:
    """A numbered body's number and message. Raises ProtocolError when it is too short for one."""
    if len(body) < NUMBER.size:
        raise ProtocolError("a message without its number")
    return NUMBER.unpack_from(body)[0], memoryview(body)[NUMBER.size :]


def take_frame(buffer: bytearray) -> bytes | None:
    """The body of the first frame of `buffer`, which is removed; None while the frame is incomplete.

    Raises ProtocolError for a length out of bounds.
    """
    return local_socket.take_frame(buffer, limit=MAX_FRAME_BYTES)
