"""Messages between a client and the daemon, each in a frame of `cornplug/local_socket.py`.

    greetings     one msgpack message, of any version: `ClientHello`, `DaemonWelcome`, `ClientRejected`
    all others    u32 number | one msgpack message. A reply has the number of its request

Each request except `ReleaseRequest` and `RecallRequest` has one reply. Replies are in the order of the
requests. A client detects a late reply by its number. The client splits large requests (`MAX_KEYS`) and the
daemon truncates large replies (`LeaseReply`), so that a client does not wait long for another client's
request. Keys are joined into one blob, because 256 keys then decode as one object instead of 256. Payload
bytes are never sent. The arena and its tables are sent once, as file descriptors that accompany
`DaemonWelcome`.

The `check_*` functions hold the bounds of requests. Clients, the daemon and the store in memory call them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from cornplug import local_socket
from cornplug.config import STORE_PROTOCOL
from cornplug.errors import ProtocolError
from cornplug.store.base import KEY_BYTES, PurgeCount, PurgeRule, Reservation, ReserveTerms, WriterPart
from cornplug.store.store_stats import StoreStat

T = TypeVar("T")

PROTOCOL_VERSION: Final = STORE_PROTOCOL
MAX_FRAME_BYTES: Final = 16 << 20
MAX_LOOKUP_KEYS: Final = 8192
"""Maximum number of keys in a `ContainsRequest`, which the daemon handles in about half a millisecond."""
MAX_KEYS: Final = 1024
"""Maximum number of keys in any other request, which the daemon handles in a few milliseconds."""
MAX_TOKENS: Final = 16
"""Maximum number of tokens in a `ReleaseRequest`. All leases of one `LeaseRequest` request share a token."""
TRUNCATE_AFTER_EXAMINED: Final = 1024
"""Maximum number of entries that the daemon examines to find memory before it truncates a reply at the next
key."""
BATCH_BYTES: Final = 1 << 20
"""Size in bytes at which a reply is truncated, and at which a client splits its commits into several
requests."""
BUSY_POLL_S: Final = 150e-6
"""Time that the daemon polls for the next request before it sleeps, in seconds. Waking a sleeping core takes
longer than any reply, and a client that has reserved memory commits soon."""
NUMBER: Final = struct.Struct("<I")
MAX_META_BYTES: Final = 1 << 20
"""Maximum size of a header in bytes. A header with checksums of 65535 segments has half of this size."""
MAX_TTL_S: Final = 3600.0
MAX_APP_BYTES: Final = 256
MAX_COST_S: Final = 3600.0
MAX_PARTS: Final = 1024
"""Maximum number of writers of one entry."""


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a client. `secret_tag` is the first 8 bytes of SHA-256 of the secret."""

    version: int
    secret_tag: bytes


class ContainsRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    keys: bytes


class LeaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    keys: bytes
    ttl_s: float


class ReserveRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    keys: bytes
    sizes: list[int]
    app: str
    part: WriterPart | None = None
    only_seen: bool = False
    cost_s: float = 0.0
    """Seconds to recompute one entry. Ignored by daemons without namespaces or of an older release."""


class CommitRequest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    tokens: list[int]
    metas: list[bytes]


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Request to release leases or reservations. It has no reply, because waiting for a reply would take a
    reader of one entry as long as copying a quarter of a MiB. The daemon handles the client's requests in
    order, so the release takes effect before the next request."""

    tokens: list[int]


class DeleteRequest(msgspec.Struct, frozen=True, array_like=True, tag=6):
    keys: bytes


class StatRequest(msgspec.Struct, frozen=True, array_like=True, tag=7):
    pass


class PurgeRequest(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Request to purge the next batch. The client repeats the request while `PurgeReply.more` is true."""

    rule: PurgeRule
    begins: bool


class RecallRequest(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Request to recall entries, which has no reply. The table of entries shows which entries have been
    recalled. It shows the ticket when the far-store lookup of absent keys is complete."""

    keys: bytes
    ticket: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Random number chosen by the client, or 0 for no ticket. Daemons of older releases ignore the ticket."""


class DaemonWelcome(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Reply to `ClientHello`. It is accompanied by the file descriptors of the arena, its write fences, the
    table of entries and the notes of reads."""

    arena_id: bytes
    capacity_bytes: int
    notes_page: int
    """Page in which this client notes its reads (`UseNotes`), or -1 if there is no free page. Without a
    page, each read needs a message."""


class ContainsReply(msgspec.Struct, frozen=True, array_like=True, tag=11):
    mask: bytes


class LeaseReply(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Leases for the first keys of the request, at least one. The reply is truncated if it is large."""

    token: int
    """Token of all these leases, or 0 if no key is present."""
    metas: list[bytes | None]
    """Header of each entry, or None if the key is absent."""
    places: bytes
    """Locations, in the encoding of `Leases.places`."""


class ReserveReply(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Results for the first keys of the request, at least one. The reply is truncated if finding memory takes
    long."""

    results: list[Reservation | str]
    """Reservation for each key, or the value of a `ReserveRefusal`."""


class CommitReply(msgspec.Struct, frozen=True, array_like=True, tag=14):
    done: list[bool]


class DeleteReply(msgspec.Struct, frozen=True, array_like=True, tag=16):
    count: int


class StatReply(msgspec.Struct, frozen=True, array_like=True, tag=17):
    stat: StoreStat


class ClientRejected(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Rejection of a client. The daemon then closes the connection."""

    reason: Literal["version", "secret"]
    message: str


class RequestFault(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Rejection of a request, which was not executed. The connection stays open."""

    message: str


class PurgeReply(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Result of one batch of a purge. `more` is true if further batches remain."""

    count: PurgeCount
    more: bool


Request = (
    ClientHello
    | ContainsRequest
    | LeaseRequest
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
    """Return the 8 bytes that client and daemon compare to check that they have the same secret."""
    return hashlib.sha256(secret).digest()[:8]


def frame(message: Request | Reply, number: int | None = None) -> bytes:
    """Return the frame of a message. Raises ValueError if it exceeds MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if number is not None:
        body = NUMBER.pack(number) + body
    return local_socket.encode_frame(body, limit=MAX_FRAME_BYTES)


def split_batches(items: Sequence[T], max_items: int) -> Iterator[Sequence[T]]:
    """Yield the items in batches of at most `max_items` items. Without items, yield one empty batch, so that
    the caller still sends one request."""
    for start in range(0, max(len(items), 1), max_items):
        yield items[start : start + max_items]


def split_commits(
    written: Sequence[tuple[Reservation, bytes]],
) -> Iterator[Sequence[tuple[Reservation, bytes]]]:
    """Yield batches of at most MAX_KEYS entries and about BATCH_BYTES."""
    start = size = 0
    for at, (_, meta) in enumerate(written):
        size += len(meta)
        if at > start and (size > BATCH_BYTES or at - start == MAX_KEYS):
            yield written[start:at]
            start, size = at, len(meta)
    yield written[start:]


def check_count(count: int, max_count: int = MAX_KEYS) -> None:
    """Raise ValueError if there are more keys or tokens than a request may have."""
    if count > max_count:
        raise ValueError(f"{count} keys or tokens in one request, at most {max_count}")


def split_keys(blob: bytes, max_keys: int = MAX_KEYS) -> list[bytes]:
    """Split joined keys. Raises ValueError if the length is not a multiple of the key size, or if there are
    more than `max_keys` keys."""
    if len(blob) % KEY_BYTES:
        raise ValueError(f"{len(blob)} bytes are not a whole number of keys")
    check_count(len(blob) // KEY_BYTES, max_keys)
    # This is five times as fast as slicing in a loop.
    return list(struct.unpack(f"{KEY_BYTES}s" * (len(blob) // KEY_BYTES), blob))


def split_number(body: bytes) -> tuple[int, memoryview]:
    """Return the number and the message in a frame's body. Raises ProtocolError if the body is too short."""
    if len(body) < NUMBER.size:
        raise ProtocolError("a message has no number")
    return NUMBER.unpack_from(body)[0], memoryview(body)[NUMBER.size :]


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove the first frame from `buffer` and return its body, or None if the frame is incomplete.

    Raises ProtocolError if the length is out of bounds.
    """
    return local_socket.pop_frame(buffer, limit=MAX_FRAME_BYTES)


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise ValueError unless every key has 32 bytes."""
    # Do not loop in Python, because there may be hundreds of keys.
    if others := set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key must have {KEY_BYTES} bytes, not {min(others)}")


def check_entries(entries: Sequence[tuple[bytes, int]]) -> None:
    """Raise ValueError if a key is invalid or a size is negative."""
    check_keys([key for key, _ in entries])
    for _, size in entries:
        if size < 0:
            raise ValueError(f"a payload cannot have {size} bytes")


def check_ttl(ttl_s: float) -> None:
    """Raise ValueError if `ttl_s` is not above 0 and at most MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"ttl_s is {ttl_s}; it must be above 0 and at most {MAX_TTL_S:g}")


def check_app(app: str) -> None:
    """Raise ValueError if the name has more than MAX_APP_BYTES bytes."""
    if len(app.encode()) > MAX_APP_BYTES:
        raise ValueError(
            f"the name of an app must have at most {MAX_APP_BYTES} bytes, not {len(app.encode())}"
        )


def check_terms(terms: ReserveTerms) -> None:
    """Raise ValueError if the app's name is too long, or if the part or the recomputation time is out of
    bounds."""
    check_app(terms.app)
    if not 0 <= terms.cost_s <= MAX_COST_S:
        raise ValueError(f"cost_s is {terms.cost_s}; it must be between 0 and {MAX_COST_S:g}")
    part = terms.part
    if part is None:
        return
    if not 16 <= len(part.group) <= 32:
        raise ValueError(f"a group must have 16 to 32 bytes, not {len(part.group)}")
    if not 0 <= part.index < part.count <= MAX_PARTS:
        raise ValueError(f"invalid part {part.index} of {part.count}, there are at most {MAX_PARTS} parts")


def check_purge(rule: PurgeRule) -> None:
    """Raise ValueError if the app or an age is invalid."""
    if rule.app is not None:
        check_app(rule.app)
    for age_s in (rule.older_s, rule.unused_s):
        if not 0 <= age_s < math.inf:
            raise ValueError(f"age is {age_s} s; it must be at least 0 s")


def check_meta(meta: bytes) -> None:
    """Raise ValueError if `meta` is larger than MAX_META_BYTES."""
    if len(meta) > MAX_META_BYTES:
        raise ValueError(f"meta has {len(meta)} bytes, the maximum is {MAX_META_BYTES}")
