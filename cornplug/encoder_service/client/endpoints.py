"""Services and this host's store from the configuration, and the order of services for each media item.

The order is computed by highest-random-weight (rendezvous) hashing, so a repeated item goes to the service
that has it cached. All clients compute the same order without coordination. When a service fails, each of its
items goes to the second service in the item's order. Other items are not affected. When the service recovers,
its items go to it again.

Requests over httpx contain the caller's trace context if opentelemetry-api is installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import ipaddress
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from cornplug.config import Config
from cornplug.encoder_service.client.retry import HttpResponse
from cornplug.errors import ConfigError, EncoderUnavailable
from cornplug.host import reachable_address
from cornplug.store.base import Store
from cornplug.store.client import is_host_store, open_store

_HASH_RANGE: Final = float(1 << 53)
_CONNECT_S: Final = 1.0
"""Seconds to wait for a connection. A host that needs longer to accept a connection counts as down."""
_MAX_RESPONSE_BYTES: Final = 1 << 30


def parse_services(urls: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each service, by URL. URLs are normalised, so that all clients compute the same
    order.

    Raises ConfigError("encoder.urls") for an empty list, a scheme other than http and https, or a weight that
    is not positive and finite.
    """
    weighted = (
        urls if isinstance(urls, Mapping) else dict.fromkeys([urls] if isinstance(urls, str) else urls, 1.0)
    )
    if not weighted:
        raise ConfigError("encoder.urls", "no service is set", 'Set a URL such as "http://host:8750".')
    made: dict[str, float] = {}
    for url, weight in weighted.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "encoder.urls", f"{url!r} is not an http URL", 'Write a URL such as "http://host:8750".'
            )
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(
                "encoder.urls", f"{url} has the invalid weight {weight}", "Set a number above 0."
            )
        made[url.rstrip("/")] = float(weight)
    return made


def rank_services(content: bytes, services: Mapping[str, float]) -> list[str]:
    """Return all services in order of preference for a media item with the digest `content`.

    The share of items for which a service is first is proportional to its weight. The score is -w / ln(u),
    with u from SHA-256, uniform in (0, 1) (Schindelhauer and Schomaker, "Weighted distributed hash tables",
    2005).
    """

    def score(url: str) -> float:
        drawn = hashlib.sha256(b"cornplug-rendezvous-v1\0" + content + url.encode()).digest()
        uniform = ((int.from_bytes(drawn[:8], "big") >> 11) + 0.5) / _HASH_RANGE
        return -services[url] / math.log(uniform)

    return sorted(services, key=score, reverse=True)


def configured_urls(config: Config) -> Sequence[str]:
    """Return the URLs of the configured services."""
    host = reachable_address(config.encoder.host)
    return config.encoder.urls or [f"http://{f'[{host}]' if ':' in host else host}:{config.encoder.port}"]


def is_local_url(url: str) -> bool:
    """Return whether the service at `url` is on this host and therefore saves to this host's store."""
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach `host`: a loopback address, or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_name(name: str) -> str:
    """Return a model's name in URLs: a hub id unchanged, or the last component of a folder's path."""
    path = PurePath(name)
    return path.name if path.is_absolute() or name.startswith(".") else name


def open_local_store(config: Config) -> Store | None:
    """Return the configured store. Return None if it is this host's store and has not been started."""
    if is_host_store(config.store) and not config.store.socket.exists():
        return None
    return open_store(config.store, autostart=False)


def trace_headers() -> dict[str, str]:
    """Return the headers that propagate the current span (`traceparent`, and headers of the app's
    propagators).

    Empty if there is no span.
    """
    headers: dict[str, str] = {}
    inject = _load_injector()
    if inject is not None:
        inject(headers)
    return headers


@functools.cache
def _load_injector() -> Callable[[dict[str, str]], None] | None:
    # Import at the first request, so that importing this module stays fast.
    try:
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    inject: Callable[[dict[str, str]], None] = propagate.inject
    return inject


async def send_request(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> HttpResponse:
    """Send a request and return the complete response.

    Raises httpx.HTTPError, or EncoderUnavailable("encoder_bad_response") if the response is too large.
    """
    headers = {**trace_headers(), **(headers or {})}
    async with http.stream(method, url, timeout=_timeout(timeout_s), headers=headers, **body) as response:
        return await _read_response(url, response)


def form_fields(model: str, cache_salt: str | None, deadline_s: float, *, inline: bool) -> dict[str, str]:
    """Return the form fields of a request to `/v1/encode`, without the media item."""
    fields = {"model": model, "deadline_s": f"{deadline_s:g}", "inline": "true" if inline else "false"}
    return fields if cache_salt is None else {**fields, "cache_salt": cache_salt}


async def _read_response(url: str, response: httpx.Response) -> HttpResponse:
    chunks, size = [], 0
    async for chunk in response.aiter_raw():
        chunks.append(chunk)
        size += len(chunk)
        if size > _MAX_RESPONSE_BYTES:
            raise EncoderUnavailable(
                f"{url} sent a response that is too large", reason="encoder_bad_response"
            )
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(url=url, status=response.status_code, headers=headers, body=b"".join(chunks))


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
