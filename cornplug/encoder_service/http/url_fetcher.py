"""Fetches media by URL, from public addresses and from addresses that the operator allows.

    url ─> scheme, port, host on the list ─> a slot ─> resolve once ─> every address public or listed
        ─> connect to this address ─> redirect? repeat all checks, at most three times ─> bytes

A name is resolved once per fetch, and the connection goes to the address that was checked. Therefore DNS
rebinding has no effect. Connections are kept for later fetches from the same host and address. Proxies,
credentials and cookies are not used. Compression is not accepted, because the size of the content is unknown
before decompression. Cache keys contain a digest of the content, not the URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import ssl
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Final

import httpx

from cornplug import __version__
from cornplug.config import EncoderConfig
from cornplug.encoder_service.fair_queue import MAX_WAITING
from cornplug.encoder_service.http.fetch_slots import FetchSlot, FetchSlots
from cornplug.encoder_service.preprocess.decode_lanes import BudgetShare
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import ServiceClass

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
MAX_REDIRECTS: Final = 3
MAX_FETCHES: Final = 64
"""Maximum number of concurrent URL fetches. Each service class has a share of them."""
FETCH_DEADLINE_S: Final = 5.0
"""Maximum seconds for fetching one URL, including redirects but not the wait for a slot."""
_MAX_URL_CHARS: Final = 4096
_ANY_HOST: Final = "*"
_IDLE_CONNECTIONS: Final = 8
"""Maximum number of idle connections to one host that are kept for later fetches."""
_IDLE_S: Final = 15.0
_MAX_HOSTS: Final = 64
"""Maximum number of hosts whose connections are kept, unless more hosts are in use."""
_PORTS: Final = {"http": 80, "https": 443}
_DEFAULT_PORTS: Final = frozenset(_PORTS.values())
"""Allowed ports for an entry of `encoder.allow_hosts` without a port."""
_ENTRY_WITH_PORT: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+):([0-9]{1,5})")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]+")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_NON_PUBLIC_NETWORKS: Final = (
    IPv4Network("192.88.99.0/24"),  # 6to4's anycast: any network may announce it and receive its traffic
    # protocol assignments; 192.0.0.192 is the metadata service of Oracle's cloud
    IPv4Network("192.0.0.0/24"),
    IPv4Network("168.63.129.16/32"),  # the platform's agent on every Azure machine
)
"""Networks that are not public, although `ipaddress` may treat them as public."""
_HEADERS: Final = {"accept-encoding": "identity", "user-agent": f"cornplug/{__version__}", "accept": "*/*"}


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of `encoder.allow_hosts`."""

    host: str
    """Host in lower case: an exact name, "*.suffix" for all names below the suffix, or "*" for every host."""
    ports: frozenset[int] = _DEFAULT_PORTS

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """Parse "HOST", "HOST:PORT", "[IPV6]" or "[IPV6]:PORT". Raises ConfigError for any other text."""
        word = entry.lower()
        # An IPv6 address without brackets has several colons and no port.
        parts = _ENTRY_WITH_PORT.fullmatch(word)
        host, port = (parts[1], int(parts[2])) if parts else (word, None)
        host = host.strip("[]")
        if (host != _ANY_HOST and not _HOST.fullmatch(host)) or (port is not None and not 0 < port < 65536):
            raise ConfigError(
                "encoder.allow_hosts",
                f"{entry!r} is not a host",
                "Write example.org, *.example.org, * or example.org:8080, without scheme.",
            )
        return cls(host, _DEFAULT_PORTS if port is None else frozenset({port}))

    def matches(self, host: str) -> bool:
        """Return whether the entry is for this host."""
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in (host, _ANY_HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlRules:
    """Rules that determine which URLs and addresses are allowed. Does not use sockets."""

    hosts: tuple[AllowedHost, ...]
    networks: tuple[Network, ...]
    """Networks that are allowed although they are not public."""

    @classmethod
    def from_config(cls, config: EncoderConfig) -> UrlRules:
        """Create the rules from the settings. Raises ConfigError for an invalid setting."""
        hosts = tuple(map(AllowedHost.parse, config.allow_hosts))
        try:
            networks = tuple(map(ipaddress.ip_network, _split_list(config.allow_networks)))
        except ValueError as e:
            raise ConfigError("encoder.allow_networks", str(e), "Write networks such as 10.2.0.0/16.") from e
        return cls(hosts=hosts, networks=networks)

    def allows_host(self, host: str) -> bool:
        """Return whether the host's name is allowed. Call this before resolving the name."""
        return any(entry.matches(host) for entry in self.hosts)

    def allows_port(self, host: str, port: int) -> bool:
        """Return whether an entry allows this port of the host."""
        return any(port in entry.ports for entry in self.hosts if entry.matches(host))

    def allows_address(self, address: Address) -> bool:
        """Return whether an address is public or in `networks`. An IPv6 address that embeds a private IPv4
        address is rejected."""
        plain = _unmap_ipv4(address)
        if any(plain in network for network in self.networks if network.version == plain.version):
            return True
        return _is_public(plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """URL that passed the rules, and the addresses to which its host's name resolved."""

    url: httpx.URL
    host: str
    port: int
    addresses: tuple[Address, ...]


@cache
def _system_tls(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Return a TLS context with this host's certificate authorities.

    The arguments are the values of OpenSSL's environment variables for these authorities. They serve only as
    cache key. The context is cached, because reading the authorities takes 30 ms of CPU time.
    """
    return ssl.create_default_context()


class _ConnectionPool:
    """Pool of idle connections, by scheme, host name and port. Use it from one event loop.

    A transport finds connections only by address. With a single transport for all hosts, a request could use
    a connection to another host at the same address, for which another certificate was checked.
    """

    def __init__(self) -> None:
        self._tls = _system_tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        self._transports: OrderedDict[tuple[str, str, int], httpx.AsyncHTTPTransport] = OrderedDict()
        self._use_counts: Counter[tuple[str, str, int]] = Counter()

    @contextlib.asynccontextmanager
    async def transport_for(self, target: _Target) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """Yield the transport for the target's host. The transport is not closed during the context."""
        key = target.url.scheme, target.host, target.port
        if key not in self._transports:
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS, keepalive_expiry=_IDLE_S
            )
            self._transports[key] = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)
        self._transports.move_to_end(key)
        self._use_counts[key] += 1
        try:
            yield self._transports[key]
        finally:
            self._use_counts[key] -= 1
            unused = [old for old in self._transports if not self._use_counts[old]]
            for old in unused[: max(0, len(self._transports) - _MAX_HOSTS)]:
                del self._use_counts[old]
                await self._transports.pop(old).aclose()

    async def close(self) -> None:
        while self._transports:
            await self._transports.popitem()[1].aclose()


class UrlFetcher:
    """Fetches media from URLs that the rules allow. Use it from one event loop, and call `close` in that
    loop."""

    def __init__(self, rules: UrlRules, slots: FetchSlots, *, max_bytes: int, deadline_s: float) -> None:
        self._rules = rules
        self._slots = slots
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._connections = _ConnectionPool()

    @classmethod
    def from_config(cls, config: EncoderConfig, classes: Sequence[ServiceClass]) -> UrlFetcher:
        """Create a fetcher. Raises the same errors as `UrlRules.from_config`."""
        return cls(
            UrlRules.from_config(config),
            FetchSlots(classes, MAX_FETCHES, max_waiting=MAX_WAITING),
            max_bytes=config.max_body_bytes,
            deadline_s=FETCH_DEADLINE_S,
        )

    async def fetch(
        self, field: str, url: str, *, qos: ServiceClass, deadline_s: float, budget_share: BudgetShare
    ) -> bytes:
        """Return the bytes at `url`. `budget_share` counts them, and error messages begin with `field`.

        Waits at most `deadline_s` seconds for a slot of the class. The fetch's time limit starts when it gets
        a slot. Raises EncoderRefused: "remote_url" if the host, scheme, port, address or redirect is not
        allowed, "remote_failed" if there is no response or a status other than 200, "remote_timeout",
        "too_large", or "fetches_full". Also raises the same errors as `BudgetShare.resize`.
        """
        if not self._rules.hosts:
            raise EncoderRefused(
                f"{field}: this service does not fetch URLs (encoder.allow_hosts is empty); send the bytes",
                reason="remote_url",
            )
        self._check_url(field, url, None)
        end = asyncio.get_running_loop().time() + deadline_s
        async with self._slots.acquire(qos, field, deadline_s=deadline_s) as slot:
            left_s = end - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(min(self._deadline_s, left_s)):
                    return await self._follow_redirects(field, url, slot, budget_share)
            except (TimeoutError, httpx.TimeoutException):
                raise EncoderRefused(
                    f"{field}: the URL's host took too long", reason="remote_timeout"
                ) from None
            except (httpx.HTTPError, OSError, UnicodeError) as e:
                problem = f"{field}: fetching the URL failed: {type(e).__name__}"
                raise EncoderRefused(problem, reason="remote_failed") from e

    async def close(self) -> None:
        """Close the kept connections."""
        await self._connections.close()

    async def _follow_redirects(
        self, field: str, text: str, slot: FetchSlot, budget_share: BudgetShare
    ) -> bytes:
        before: httpx.URL | None = None
        for _ in range(MAX_REDIRECTS + 1):
            url = self._check_url(field, text, before)
            body_or_redirect = await self._get_from_any_address(
                field, await self._resolve(field, url, slot), budget_share
            )
            if isinstance(body_or_redirect, bytes):
                return body_or_redirect
            before, text = url, body_or_redirect
        raise EncoderRefused(f"{field}: more than {MAX_REDIRECTS} redirects", reason="remote_url")

    def _check_url(self, field: str, text: str, redirected_from: httpx.URL | None) -> httpx.URL:
        """Return the absolute URL. Raises EncoderRefused if its scheme, host or port is not allowed.

        `redirected_from` is the URL that redirected to `text`, or None.
        """
        try:
            if len(text) > _MAX_URL_CHARS:
                raise httpx.InvalidURL(f"longer than {_MAX_URL_CHARS} characters")
            url = httpx.URL(text) if redirected_from is None else redirected_from.join(text)
            host = _normalized_host(url)
        except (httpx.InvalidURL, UnicodeError) as e:
            raise EncoderRefused(f"{field}: not a URL: {e}", reason="remote_url") from None
        problem = None
        if url.scheme not in _PORTS or (
            redirected_from is not None and redirected_from.scheme == "https" != url.scheme
        ):
            problem = "only http and https URLs are fetched, without redirects from https to http"
        elif url.userinfo:
            problem = "URLs with a user name or password are not fetched"
        elif not self._rules.allows_host(host):
            problem = "the URL's host is not in encoder.allow_hosts; send the bytes"
        elif not self._rules.allows_port(host, url.port or _PORTS[url.scheme]):
            problem = "encoder.allow_hosts does not allow the URL's port for this host; send the bytes"
        if problem is not None:
            raise EncoderRefused(f"{field}: {problem}", reason="remote_url")
        return url

    async def _resolve(self, field: str, url: httpx.URL, slot: FetchSlot) -> _Target:
        host, port = _normalized_host(url), url.port or _PORTS[url.scheme]
        # A lookup cannot be cancelled, so it occupies the slot until the name server replies.
        looking = _look_up_host(host, port)
        slot.keep_until(looking)
        found = await asyncio.shield(looking)
        addresses = tuple(
            dict.fromkeys(ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found)
        )
        # Reject the URL if any of the addresses is not allowed. Such a reply is an attack or a mistake.
        if not addresses or not all(map(self._rules.allows_address, addresses)):
            raise EncoderRefused(
                f"{field}: the URL's address is neither public nor in encoder.allow_networks",
                reason="remote_url",
            )
        return _Target(url=url, host=host, port=port, addresses=addresses)

    async def _get_from_any_address(
        self, field: str, target: _Target, budget_share: BudgetShare
    ) -> bytes | str:
        """Return the body as bytes, or the location of a redirect as text. Tries the addresses in order."""
        for address in target.addresses[:-1]:
            try:
                return await self._get_from(field, target, address, budget_share)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._get_from(field, target, target.addresses[-1], budget_share)

    async def _get_from(
        self, field: str, target: _Target, address: Address, budget_share: BudgetShare
    ) -> bytes | str:
        url = target.url.copy_with(host=str(address), port=target.port, fragment=None)
        authority = target.url.netloc.decode("ascii")
        timeout = httpx.Timeout(self._deadline_s, connect=self._deadline_s / len(target.addresses))
        request = httpx.Request(
            "GET",
            url,
            headers={"host": authority, **_HEADERS},
            extensions={"sni_hostname": target.host, "timeout": timeout.as_dict()},
        )
        async with self._connections.transport_for(target) as transport:
            response = await _send_with_retry(transport, request)
            try:
                if response.status_code in (301, 302, 303, 307, 308):
                    return response.headers.get("location", "")
                return await self._read_body(field, response, budget_share)
            finally:
                await response.aclose()

    async def _read_body(self, field: str, response: httpx.Response, budget_share: BudgetShare) -> bytes:
        if response.status_code != 200:
            problem = f"{field}: the URL's host returned status {response.status_code}"
            raise EncoderRefused(problem, reason="remote_failed")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise EncoderRefused(f"{field}: the URL's host sent compressed content", reason="remote_failed")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._max_bytes:
                raise EncoderRefused(
                    f"{field}: larger than the limit of {self._max_bytes} bytes", reason="too_large"
                )
            budget_share.resize(len(body))
        return bytes(body)


async def _send_with_retry(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    """Send the request, and return the response when its headers have arrived.

    Retries once, because the host may have closed an idle connection.
    """
    try:
        return await transport.handle_async_request(request)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        return await transport.handle_async_request(request)


def _look_up_host(host: str, port: int) -> asyncio.Future[list[Any]]:
    """Resolve a name on a separate thread. In a pool, a slow name server could block all threads."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Any]] = loop.create_future()

    def done(found: list[Any], error: OSError | UnicodeError | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    def look() -> None:
        found: list[Any] = []
        error: OSError | UnicodeError | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(done, found, error)

    threading.Thread(target=look, name="cornplug-names", daemon=True).start()
    return future


def _split_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _normalized_host(url: httpx.URL) -> str:
    """Return the host in the same form as `AllowedHost.host`: ASCII, in lower case, without a trailing
    dot."""
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _unmap_ipv4(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return _is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        # Reject tunnel addresses, because they lead to IPv4 addresses that are not checked.
        if address.sixtofour or address.teredo or address not in _GLOBAL_UNICAST:
            return False
    elif any(address in network for network in _NON_PUBLIC_NETWORKS):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
