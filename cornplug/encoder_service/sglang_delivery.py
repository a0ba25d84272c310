"""Where embeddings for SGLang go: who may be sent to, who waits for which part, and the sending.

Everybody who reaches the HTTP port can name a host and a port to send to. So a receiver must be
the host that asks, or lie in a network that the deployment lists (`encoder.receivers`): the
service opens no connection to anybody else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.asyncio

from cornplug.errors import EncoderRefused

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_WAITING: Final = 8192
_LINGER_MS: Final = 5000
"""How long libzmq goes on with a message that it has taken, after the socket was closed."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Decides who may be sent to."""

    networks: Sequence[IPNetwork] = ()

    async def endpoint(self, host: str, port: int, *, asked_by: str | None) -> str:
        """The ZMQ endpoint of a receiver, by the address that was checked, not by its name.

        Raises EncoderRefused("forbidden_receiver").
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        for *_, address in found:
            ip = _normal(str(address[0]))
            if ip is not None and self._may_send(ip, _normal(asked_by)):
                shown = f"[{ip}]" if ip.version == 6 else str(ip)
                return f"tcp://{shown}:{port}"
        raise EncoderRefused(
            f"{host!r} is not the host that asks ({asked_by}), and in no network of encoder.receivers",
            reason="forbidden_receiver",
        )

    def _may_send(self, ip: IPAddress, asker: IPAddress | None) -> bool:
        if ip.is_unspecified or ip.is_multicast:
            return False
        if any(ip in network for network in self.networks):
            return True
        return asker is not None and (ip == asker or (_is_here(asker) and _is_here(ip)))


@dataclass(slots=True)
class _Waiting:
    since_s: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    count: int | None = None
    endpoints: list[str] = field(default_factory=list)


class Rendezvous:
    """Receivers and parts find each other, whichever comes first. For one event loop.

    What finds nobody is forgotten after `forget_s`.
    """

    def __init__(self, *, forget_s: float) -> None:
        self._forget_s = forget_s
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def register(self, req_id: str, count: int, endpoint: str) -> None:
        """One of `count` receivers of a part. Raises EncoderRefused where they disagree on `count`."""
        waiting = self._entry(req_id)
        if waiting.count not in (None, count):
            raise EncoderRefused(
                f"receive_count: {count}, another receiver said {waiting.count}", reason="bad_input"
            )
        waiting.count = count
        if endpoint not in waiting.endpoints:
            waiting.endpoints.append(endpoint)
        if len(waiting.endpoints) >= count:
            waiting.complete.set()

    async def receivers(self, req_id: str, *, deadline_s: float) -> Sequence[str]:
        """All receivers of a part. Raises EncoderRefused("no_receiver") after the deadline."""
        waiting = self._entry(req_id)
        try:
            await asyncio.wait_for(waiting.complete.wait(), deadline_s)
        except TimeoutError:
            raise EncoderRefused(
                f"{len(waiting.endpoints)} of {waiting.count or 'unknown'} receivers came",
                reason="no_receiver",
            ) from None
        finally:
            self._waiting.pop(req_id, None)
        return waiting.endpoints

    def _entry(self, req_id: str) -> _Waiting:
        now = time.monotonic()
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if len(self._waiting) < _MAX_WAITING and now - oldest.since_s < self._forget_s:
                break
            self._waiting.popitem(last=False)
        return self._waiting.setdefault(req_id, _Waiting(now))


class Sender:
    """Sends multipart messages, a connection each: a receiver's port is often used just once."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    async def send(self, endpoint: str, frames: Sequence[bytes], *, deadline_s: float) -> None:
        """Hand a message to a receiver that is connected. Raises EncoderRefused("undeliverable")."""
        sock = self._context.socket(zmq.PUSH)
        # A message is taken once there is a connection, so that silence is noticed.
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
        """End every connection; messages under way have `_LINGER_MS` to arrive."""
        self._context.term()


def _normal(host: str | None) -> IPAddress | None:
    try:
        ip = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def _is_here(ip: IPAddress) -> bool:
    """Whether this host has the address: only then can it be bound."""
    if ip.is_loopback:
        return True
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True
