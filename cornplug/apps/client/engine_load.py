"""Queue lengths of engines, read from their Prometheus metrics in the background at most once per second."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import httpx

from cornplug.host import tls_context
from cornplug.planner.replan.observed_load import PRESENT, WAITING

INTERVAL_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_MOST_BYTES: Final = 8 << 20
_SAMPLE: Final = re.compile(rf"^({'|'.join(PRESENT)})(?:\{{.*\}})? (\S+)", re.MULTILINE)
"""Line of one of the four gauges. Parsing all lines of the response takes a hundred times as long."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Number of requests of all clients in one engine."""

    waiting: float
    running: float


def parse(page: str) -> EngineLoad | None:
    """Return the load in a metrics response, or None if it has none of the gauges."""
    found = [(name, float(value)) for name, value in _SAMPLE.findall(page)]
    if not found:
        return None
    waiting = sum(value for name, value in found if name in WAITING)
    return EngineLoad(waiting, sum(value for _, value in found) - waiting)


Report = Callable[[Mapping[str, EngineLoad]], None]


class LoadPoller:
    """Reader of the engines' metrics while requests arrive. The load of an engine that does not respond is
    unknown."""

    def __init__(self, report: Report, *, interval_s: float = INTERVAL_S) -> None:
        self._report = report
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def poke(self, engines: Collection[str]) -> None:
        """Start a reading in a thread if the last one is older than the interval. Returns immediately."""
        with self._lock:
            now = time.monotonic()
            busy = self._thread is not None and self._thread.is_alive()
            if busy or now < self._next_s:
                return
            self._next_s = now + self._interval_s
            self._thread = threading.Thread(
                target=self._read, args=(tuple(engines),), name="cornplug-load", daemon=True
            )
            self._thread.start()

    def _read(self, engines: Collection[str]) -> None:
        found: dict[str, EngineLoad] = {}
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=tls_context()) as http:
            for engine in engines:
                load = _load(http, engine)
                if load is not None:
                    found[engine] = load
        self._report(found)


def _load(http: httpx.Client, engine: str) -> EngineLoad | None:
    try:
        with http.stream("GET", f"{engine}/metrics") as page:
            if page.status_code != 200:
                return None
            text, end_s = b"", time.monotonic() + _TIMEOUT_S
            for chunk in page.iter_bytes():
                text += chunk
                if len(text) > _MOST_BYTES or time.monotonic() > end_s:
                    return None
        return parse(text.decode(errors="replace"))
    except (httpx.HTTPError, ValueError):
        return None
