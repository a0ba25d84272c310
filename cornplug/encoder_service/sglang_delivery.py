"""Messages of SGLang's encoder protocol, and delivery of embeddings to SGLang's language-only servers.

Requests are JSON and are validated strictly. An embedding is sent to the server's ZMQ socket as two frames:

    header    a pickle, because SGLang 0.5.23 reads no other format
    payload   the embedding, C-contiguous, little-endian

This module never reads a pickle, and writes the header without Python's pickle module. The header is a fixed
sequence of opcodes of protocol 2. It creates one `EmbeddingData` with a dictionary of strings, integers and
lists. It refers to three globals: the class, the modality and the dtype. All three are on the allow list of
SGLang's unpickler (`sglang.srt.utils.common.SafeUnpickler`). SGLang ignores additional entries in the
dictionary.

Any client of the HTTP port can choose a host and a port to which embeddings are sent. Therefore a receiver
must be the requesting host, or be in a network of `encoder.receivers`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
import zmq
import zmq.asyncio

from cornplug.encoder_service.formats.engine_seal import SignedClaim
from cornplug.errors import EncoderRefused

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_WAITING: Final = 4096
"""Maximum number of requests per group that wait for a part or for receivers."""
_MAX_GROUPS: Final = 256
_TRUSTED_GROUPS: Final = ("here", "deployment")
_RESOLVE_S: Final = 2.0
_LINGER_MS: Final = 5000
"""Milliseconds for which libzmq continues to send queued messages after the socket is closed."""
_RECEIVER_MODULE: Final = "sglang.srt.disaggregation.encoder.receiver"
_MODALITY_MODULE: Final = "sglang.srt.multimodal.modality"
_IMAGE_MODALITY: Final = 1
DTYPES: Final = ("float32", "float16", "bfloat16")
_RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class ReceiverGuard:
    """Checks the addresses to which embeddings are sent. Use it from one event loop."""

    def __init__(self, networks: Sequence[IPNetwork] = ()) -> None:
        self._networks = networks
        # Use a separate pool, so that a slow name server delays only other lookups of receivers.
        self._lookup_threads = ThreadPoolExecutor(2, "cornplug-names")

    async def resolve_endpoint(self, host: str, port: int, *, requester: str | None) -> str:
        """Return the ZMQ endpoint of a receiver, with the checked address in place of the host's name.

        `requester` is the address of the requesting host. Raises EncoderRefused("forbidden_receiver") if none
        of the host's addresses is allowed.
        """
        for address in await self._resolve_host(host):
            ip = _parse_address(address)
            if ip is not None and self._may_send(ip, _parse_address(requester)):
                shown = f"[{ip}]" if ip.version == 6 else str(ip)
                return f"tcp://{shown}:{port}"
        raise EncoderRefused(
            f"{host!r} is not the requesting host ({requester}) and not in a network of encoder.receivers",
            reason="forbidden_receiver",
        )

    def group_of(self, requester: str | None) -> str:
        """Return the group in which requests from this address are matched with receivers.

        A group is one host, or all hosts in the networks of `encoder.receivers`.
        """
        ip = _parse_address(requester)
        if ip is None:
            return ""
        if any(ip in network for network in self._networks):
            return _TRUSTED_GROUPS[1]
        return _TRUSTED_GROUPS[0] if _is_local_address(ip) else str(ip)

    def close(self) -> None:
        """Stop the threads that look up names."""
        self._lookup_threads.shutdown(wait=False, cancel_futures=True)

    async def _resolve_host(self, host: str) -> Sequence[str]:
        if _parse_address(host) is not None:
            return [host]
        loop = asyncio.get_running_loop()
        looked_up = loop.run_in_executor(self._lookup_threads, _look_up_host, host)
        try:
            return await asyncio.wait_for(looked_up, _RESOLVE_S)
        except (OSError, UnicodeError, TimeoutError):
            return []

    def _may_send(self, ip: IPAddress, requester: IPAddress | None) -> bool:
        if ip.is_unspecified or ip.is_multicast:
            return False
        if any(ip in network for network in self._networks):
            return True
        return requester is not None and (
            ip == requester or (_is_local_address(requester) and _is_local_address(ip))
        )


def _look_up_host(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in found]


@dataclass(slots=True)
class _PendingReceivers:
    created_s: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    expected_count: int | None = None
    endpoints: list[str] = field(default_factory=list)


class ReceiverRendezvous:
    """Matches parts with their receivers, which arrive in either order. Use it from one event loop.

    Parts and receivers match only within a group (`ReceiverGuard.group_of`). A client of another group
    therefore cannot receive a part by its request id. Unmatched entries are dropped after `ttl_s` seconds.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._groups: OrderedDict[str, OrderedDict[str, _PendingReceivers]] = OrderedDict()

    def register(self, req_id: str, group: str, count: int, endpoint: str) -> None:
        """Add one of `count` receivers of a part. Raises EncoderRefused if another receiver of the part had a
        different `count`."""
        waiting = self._get_or_create(req_id, group)
        if waiting.expected_count not in (None, count):
            raise EncoderRefused(
                f"receive_count: {count} differs from another receiver's count, {waiting.expected_count}",
                reason="bad_input",
            )
        waiting.expected_count = count
        if endpoint not in waiting.endpoints:
            waiting.endpoints.append(endpoint)
        if len(waiting.endpoints) >= count:
            waiting.complete.set()

    async def wait_receivers(self, req_id: str, group: str, *, deadline_s: float) -> Sequence[str]:
        """Wait until all receivers of a part are registered, and return their endpoints. Raises
        EncoderRefused("no_receiver") if the deadline passes first."""
        waiting = self._get_or_create(req_id, group)
        try:
            await asyncio.wait_for(waiting.complete.wait(), deadline_s)
        except TimeoutError:
            raise EncoderRefused(
                f"{len(waiting.endpoints)} of {waiting.expected_count or 'unknown'} receivers registered",
                reason="no_receiver",
            ) from None
        finally:
            self._remove(req_id, group)
        return waiting.endpoints

    def _get_or_create(self, req_id: str, group: str) -> _PendingReceivers:
        """Return the entry of a request, and create it if necessary. Each group has its own limit, so that a
        flood from one host evicts only that host's entries.
        """
        now = time.monotonic()
        if group not in self._groups and len(self._groups) >= _MAX_GROUPS:
            del self._groups[next(g for g in self._groups if g not in _TRUSTED_GROUPS)]
        waiting = self._groups.setdefault(group, OrderedDict())
        self._groups.move_to_end(group)
        while waiting:
            oldest = next(iter(waiting.values()))
            if len(waiting) < _MAX_WAITING and now - oldest.created_s < self._ttl_s:
                break
            waiting.popitem(last=False)
        return waiting.setdefault(req_id, _PendingReceivers(now))

    def _remove(self, req_id: str, group: str) -> None:
        waiting = self._groups.get(group)
        if waiting is not None:
            waiting.pop(req_id, None)
            if not waiting:
                del self._groups[group]


class ZmqSender:
    """Sends multipart messages. Each message gets its own connection, because a receiver's port is often used
    only once.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    async def send(self, endpoint: str, frames: Sequence[bytes], *, deadline_s: float) -> None:
        """Send a message to a receiver. Raises EncoderRefused("undeliverable") if the receiver does not
        accept a connection.
        """
        sock = self._context.socket(zmq.PUSH)
        # Queue the message only after the connection is established, so that a dead receiver is detected.
        sock.setsockopt(zmq.IMMEDIATE, 1)
        sock.setsockopt(zmq.IPV6, 1)
        try:
            sock.connect(endpoint)
            await asyncio.wait_for(sock.send_multipart(frames, copy=False), deadline_s)
        except (zmq.ZMQError, TimeoutError) as e:
            sock.close(linger=0)
            why = "no connection in time" if isinstance(e, TimeoutError) else str(e)
            raise EncoderRefused(f"{endpoint}: {why}", reason="undeliverable") from None
        except asyncio.CancelledError:
            sock.close(linger=0)
            raise
        sock.close(linger=_LINGER_MS)

    def close(self) -> None:
        """Close all connections. Waits at most `_LINGER_MS` for messages in flight."""
        self._context.term()


def _parse_address(host: str | None) -> IPAddress | None:
    try:
        ip = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def _is_local_address(ip: IPAddress) -> bool:
    """Return whether the address belongs to this host. If so, a socket can be bound to it."""
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Item of a request's `mm_items`: one image and the options for encoding it."""

    url: str
    detail: str | None = None
    """Level of detail, as in OpenAI's API. It has no effect, because the served families have a single
    resolution."""
    content_hash: str | None = None
    """Hash of the content, as sent by the client. It is not used, because cache keys contain a digest of the
    pixels."""
    cornplug_salt: str | None = None
    """`cache_salt` of the request, if the server has cornplug's plugin (`sglang_hooks/media/epd.py`)."""
    cornplug_salt_proof: str | None = None
    """Proof that the server has the secret (`engine_seal.prove_salt`) and may therefore set a salt."""


class EncodePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /encode: a request to encode these images and send their embeddings as one part."""

    req_id: _RequestId
    modality: Literal["IMAGE", "VIDEO", "AUDIO"]
    mm_items: Annotated[list[str | MediaItem], msgspec.Meta(min_length=1, max_length=256)]
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    part_idx: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    prefill_host: _Host | None = None
    embedding_port: _Port | None = None
    """Port of the receiver on `prefill_host`. If None, receivers register themselves
    (`ReceiverRegistration`)."""
    encoder_idx: int = 0
    encoder_url: str = ""
    time_stats_json: Any = None


class ReceiverRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /scheduler_receive_url: the registration of one of `receive_count` receivers of a part."""

    req_id: _RequestId
    receive_url: Annotated[str, msgspec.Meta(min_length=3, max_length=260)]
    """Address as host:port, with an IPv6 host in brackets."""
    receive_count: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    modality: str = "IMAGE"


def parse_encode_part(body: bytes) -> EncodePart:
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


def parse_registration(body: bytes) -> tuple[ReceiverRegistration, tuple[str, int]]:
    """Return the request and its (host, port). Raises EncoderRefused("bad_input") if it is invalid."""
    try:
        receiver = msgspec.json.decode(body, type=ReceiverRegistration)
    except (msgspec.DecodeError, RecursionError) as e:
        raise EncoderRefused(str(e), reason="bad_input") from None
    host, _, port = receiver.receive_url.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise EncoderRefused(f"receive_url: {receiver.receive_url!r} is not host:port", reason="bad_input")
    return receiver, (host.removeprefix("[").removesuffix("]"), int(port))


def items_of(part: EncodePart) -> list[MediaItem]:
    """Return the part's images as `MediaItem`s."""
    return [MediaItem(url=item) if isinstance(item, str) else item for item in part.mm_items]


def pickle_header(
    part: EncodePart,
    *,
    dtype: str,
    shape: tuple[int, int],
    grid: Sequence[Sequence[int]],
    claim: SignedClaim,
) -> bytes:
    """Return the first frame of the message with a part's embeddings.

    Args:
        part: Request to which the message is the reply.
        dtype: Dtype of the second frame.
        shape: (rows, hidden_size) of the second frame.
        grid: (frames, height, width) in patches for each image.
        claim: Signed claim about the second frame.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    fields: Mapping[str, bytes] = {
        "req_id": _pickle_text(part.req_id),
        "num_parts": _pickle_integer(part.num_parts),
        "part_idx": _pickle_integer(part.part_idx),
        "grid_dim": _pickle_list(_pickle_list(_pickle_integer(n) for n in row) for row in grid),
        "modality": _pickle_global(_MODALITY_MODULE, "Modality")
        + _pickle_integer(_IMAGE_MODALITY)
        + b"\x85R",
        "embedding": b"N",
        "send_time": b"N",
        "dtype": _pickle_global("torch", dtype),
        "shape": _pickle_list(_pickle_integer(n) for n in shape),
        "error_msg": b"N",
        "error_code": b"N",
        **{name: _pickle_text(value) for name, value in claim.to_fields().items()},
    }
    # PROTO 2; class, (), NEWOBJ; {} filled between MARK and SETITEMS; BUILD; STOP.
    body = b"".join(_pickle_text(name) + value for name, value in fields.items())
    return b"\x80\x02" + _pickle_global(_RECEIVER_MODULE, "EmbeddingData") + b")\x81}(" + body + b"ub."


def _pickle_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode("ascii")


def _pickle_text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _pickle_integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _pickle_list(values: Any) -> bytes:
    return b"](" + b"".join(values) + b"e"
