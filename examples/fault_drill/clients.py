"""Clients of a launch: each asks at a pace, by routes.json of that moment, and goes to the other engine when
its own one does not answer."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from PIL import Image

PAUSE_S: Final = 0.25
"""Between two requests of a client. Without it they would keep a starting engine from its cores."""
PATIENCE_S: Final = 120.0
"""A request has failed when no engine has answered it in this time."""
_SHARED: Final = "You describe pictures for a catalogue. Say the colours first, then the shapes. " * 6


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """One request that an engine answered."""

    end_s: float
    """By the monotonic clock."""
    seconds: float
    url: str
    """Of the engine that answered."""
    elsewhere: bool
    """Another engine than that of its class."""


class PacedClients:
    """One client for each class of routes.json, from `start` until `stop`."""

    def __init__(self, routes: Path, *, pause_s: float = PAUSE_S, patience_s: float = PATIENCE_S) -> None:
        self.answers: list[AnsweredRequest] = []
        self.failures: list[tuple[float, str]] = []
        """Time and reason."""
        self._routes = routes
        self._pause_s = pause_s
        self._patience_s = patience_s
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(name,), name=name, daemon=True)
            for name in json.loads(routes.read_text())
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them once the requests under way are answered or have failed."""
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * self._patience_s)

    def _ask_on(self, name: str) -> None:
        with httpx.Client(timeout=self._patience_s, trust_env=False) as http:
            while not self._ended.wait(self._pause_s):
                try:
                    self.answers.append(self._answer(http, name))
                except (httpx.HTTPError, RuntimeError, OSError, ValueError) as e:
                    self.failures.append((time.monotonic(), f"{name}: {e}"))

    def _answer(self, http: httpx.Client, name: str) -> AnsweredRequest:
        """Raises RuntimeError where no engine answers in time, or one refuses the request for good."""
        body, began_s = request(next(self._numbers)), time.monotonic()
        why = ""
        while time.monotonic() - began_s < self._patience_s:
            for number, url in enumerate(addresses(json.loads(self._routes.read_text()), name)):
                try:
                    sent = http.post(f"{url}/v1/chat/completions", json=body)
                except httpx.TransportError as e:
                    why = f"{url}: {type(e).__name__}"
                    continue
                if sent.status_code == 200:
                    end_s = time.monotonic()
                    return AnsweredRequest(end_s, end_s - began_s, url, number > 0)
                why = f"{url}: status {sent.status_code}, {sent.text[:200]}"
                if sent.status_code < 500:
                    raise RuntimeError(why)
            time.sleep(self._pause_s)
        raise RuntimeError(f"no answer in {self._patience_s:g} s; {why}")


def addresses(routes: dict[str, Any], name: str) -> Iterator[str]:
    """Addresses for a class: its own ones, then those of the other classes, which serve the same model."""
    ordered = [routes[name], *(way for other, way in routes.items() if other != name)]
    yield from dict.fromkeys(target["url"] for way in ordered for target in way["to"])


def request(number: int) -> dict[str, Any]:
    """A question about an image that no other request has, behind a text that all have."""
    image = {"type": "image_url", "image_url": {"url": picture(number)}}
    content = [{"type": "text", "text": _SHARED}, image, {"type": "text", "text": "What is shown?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}


def picture(number: int) -> str:
    """A PNG of coloured squares as a data URL; equal numbers give equal bytes."""
    squares = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(squares).resize((112, 112), Image.Resampling.NEAREST).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
