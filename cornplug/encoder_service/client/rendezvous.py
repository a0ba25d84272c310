"""The services' order for each medium: highest-random-weight (rendezvous) hashing.

A repeated medium goes to the service that has it cached. All clients compute the same order without
coordination. When a service fails, only its media move, each to the second service in its order; when the
service is back, they return.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from cornplug.errors import ConfigError

_SPAN: Final = float(1 << 53)


def services(urls: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Return URL -> weight, with normalised URLs, so that all clients compute the same order.

    Raises ConfigError("encoder.urls") for an empty list, a scheme other than http and https, and a weight
    that is not positive and finite.
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


def ranking(content: bytes, services: Mapping[str, float]) -> list[str]:
    """Return all services in the order for `content` (a digest).

    Each service is first for a share of contents proportional to its weight. The score is -w / ln(u) with u
    uniform in (0, 1) from SHA-256 (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005).
    """

    def score(url: str) -> float:
        drawn = hashlib.sha256(b"cornplug-rendezvous-v1\0" + content + url.encode()).digest()
        uniform = ((int.from_bytes(drawn[:8], "big") >> 11) + 0.5) / _SPAN
        return -services[url] / math.log(uniform)

    return sorted(services, key=score, reverse=True)
