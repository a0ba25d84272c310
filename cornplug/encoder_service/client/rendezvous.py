"""Which service keeps which medium: highest-random-weight hashing, so that repeats meet their cache.

Every client ranks alike, with nothing agreed between them. When a service goes, only the media
that it had move, each to the second of its own ranking; when it comes back, they return.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from cornplug.errors import ConfigError

_SPAN: Final = float(1 << 53)


def services(given: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """URL to weight, the URLs in one form: two clients that name a service alike rank it alike.

    Raises ConfigError("encoder.urls") for none, for what is no http URL, and for a weight that
    is not above zero.
    """
    weighted = (
        given
        if isinstance(given, Mapping)
        else dict.fromkeys([given] if isinstance(given, str) else given, 1.0)
    )
    if not weighted:
        raise ConfigError("encoder.urls", "no service is named", 'Give one, as "http://host:8750".')
    made: dict[str, float] = {}
    for url, weight in weighted.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("encoder.urls", f"{url!r} is no http URL", 'Write it as "http://host:8750".')
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError("encoder.urls", f"{url} has the weight {weight}", "Give a number above 0.")
        made[url.rstrip("/")] = float(weight)
    return made


def ranking(content: bytes, services: Mapping[str, float]) -> list[str]:
    """All services, the one that keeps `content` (a digest) first.

    Of many contents each service is first for a share like its weight. The score is -w / ln(u)
    with u uniform in (0, 1) from SHA-256 (Schindelhauer and Schomaker, "Weighted distributed
    hash tables", 2005).
    """

    def score(url: str) -> float:
        drawn = hashlib.sha256(b"cornplug-rendezvous-v1\0" + content + url.encode()).digest()
        uniform = ((int.from_bytes(drawn[:8], "big") >> 11) + 0.5) / _SPAN
        return -services[url] / math.log(uniform)

    return sorted(services, key=score, reverse=True)
