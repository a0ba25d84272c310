"""Delivery of embeddings to SGLang: checks receivers, matches them with parts, and sends.

Any client of the HTTP port can name a host and a port to send to. A receiver must therefore be the requesting
host, or be in a network of `encoder.receivers`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.asyncio

from cornplug.errors import EncoderRefused

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_WAITING: Final = 4096
"""Maximum number of parts and receivers that wait in one group."""
_MAX_GROUPS: Final = 256
_OURS: Final = ("here", "deployment")
_RESOLVE_S: Final = 2.0
_LINGER_MS: Final = 5000
"""Time in milliseconds that libzmq keeps sending queued messages after the socket is closed."""


class ReceiverGuard:
    """Check of the addresses that may receive embeddings. For one event loop."""

    def __init__(self, networks: Sequence[IPNetwork] = ()) -> None:
        self._networks = networks
        # A separate pool, so that a slow name server delays only other lookups of receivers.
        self._names = ThreadPoolExecutor(2, "cornplug-names")

    async def endpoint(self, host: str, port: int, *, asked_by: str | None) -> str:
        """Return the ZMQ endpoint of a receiver. It contains the checked address, not the name.

        Raises EncoderRefused("forbidden_receiver") if it has no address that is allowed.
        """
        for address in await self._addresses(host):
            ip = _normal(address)
            if ip is not None and self._may_send(ip, _normal(asked_by)):
                shown = f"[{ip}]" if ip.version == 6 else str(ip)
                return f"tcp://{shown}:{port}"
        raise EncoderRefused(
            f"{host!r} is not the requesting host ({asked_by}) and not in a network of encoder.receivers",
            reason="forbidden_receiver",
        )

    def group(self, asked_by: str | None) -> str:
        """Return the group in which parts and receivers are matched: one host, or the networks of
        `encoder.receivers`.
        """
        ip = _normal(asked_by)
        if ip is None:
            return ""
        if any(ip in network for network in self._networks):
            return _OURS[1]
        return _OURS[0] if _is_here(ip) else str(ip)

    def close(self) -> None:
        """Stop name lookups."""
        self._names.shutdown(wait=False, cancel_futures=True)

    async def _addresses(self, host: str) -> Sequence[str]:
        if _normal(host) is not None:
            return [host]
        loop = asyncio.get_running_loop()
        looked_up = loop.run_in_executor(self._names, _resolved, host)
        try:
            return await asyncio.wait_for(looked_up, _RESOLVE_S)
        except (OSError, UnicodeError, TimeoutError):
            return []

    def _may_send(self, ip: IPAddress, asker: IPAddress | None) -> bool:
        if ip.is_unspecified or ip.is_multicast:
            return False
        if any(ip in network for network in self._networks):
            return True
        return asker is not None and (ip == asker or (_is_here(asker) and _is_here(ip)))


def _resolved(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in found]


@dataclass(slots=True)
class _Waiting:
    since_s: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    count: int | None = None
    endpoints: list[str] = field(default_factory=list)


class ReceiverRendezvous:
    """Matching of parts with their receivers, in either order, within a group (`ReceiverGuard.group`). For
    one event loop.

    A client of another group cannot receive a part by its request id. Unmatched entries are dropped after
    `forget_s`.
    """

    def __init__(self, *, forget_s: float) -> None:
        self._forget_s = forget_s
        self._groups: OrderedDict[str, OrderedDict[str, _Waiting]] = OrderedDict()

    def register(self, req_id: str, group: str, count: int, endpoint: str) -> None:
        """Add one of `count` receivers of a part. Raises EncoderRefused if receivers disagree on `count`."""
        waiting = self._entry(req_id, group)
        if waiting.count not in (None, count):
            raise EncoderRefused(
                f"receive_count: {count} differs from another receiver's count, {waiting.count}",
                reason="bad_input",
            )
        waiting.count = count
        if endpoint not in waiting.endpoints:
            waiting.endpoints.append(endpoint)
        if len(waiting.endpoints) >= count:
            waiting.complete.set()

    async def receivers(self, req_id: str, group: str, *, deadline_s: float) -> Sequence[str]:
        """Return all receivers of a part. Raises EncoderRefused("no_receiver") after the deadline."""
        waiting = self._entry(req_id, group)
        try:
            await asyncio.wait_for(waiting.complete.wait(), deadline_s)
        except TimeoutError:
            raise EncoderRefused(
                f"{len(waiting.endpoints)} of {waiting.count or 'unknown'} receivers registered",
                reason="no_receiver",
            ) from None
        finally:
            self._forget(req_id, group)
        return waiting.endpoints

    def _entry(self, req_id: str, group: str) -> _Waiting:
        """Return a request's entry. Each group has its own limit, so a flood from one host evicts only that
        host's entries.
        """
        now = time.monotonic()
        if group not in self._groups and len(self._groups) >= _MAX_GROUPS:
            del self._groups[next(g for g in self._groups if g not in _OURS)]
        waiting = self._groups.setdefault(group, OrderedDict())
        self._groups.move_to_end(group)
        while waiting:
            oldest = next(iter(waiting.values()))
            if len(waiting) < _MAX_WAITING and now - oldest.since_s < self._forget_s:
                break
            waiting.popitem(last=False)
        return waiting.setdefault(req_id, _Waiting(now))

    def _forget(self, req_id: str, group: str) -> None:
        waiting = self._groups.get(group)
        if waiting is not None:
            waiting.pop(req_id, None)
            if not waiting:
                del self._groups[group]


class ZmqSender:
    """Sender of multipart messages. Each has its own connection, because a receiver's port is often used only
    once.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    async def send(self, endpoint: str, frames: Sequence[bytes], *, deadline_s: float) -> None:
        """Send a message to a receiver. Raises EncoderRefused("undeliverable") if it does not accept a
        connection.
        """
        sock = self._context.socket(zmq.PUSH)
        # A message is queued only after a connection is established, so that a dead receiver is noticed.
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
        """Close all connections. Messages in flight have `_LINGER_MS` to arrive."""
        self._context.term()


def _normal(host: str | None) -> IPAddress | None:
    try:
        ip = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def _is_here(ip: IPAddress) -> bool:
    """Return whether this host has the address: a socket can be bound to it."""
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True
