"""Open-loop load on an encoder service: apps that send at their own pace, answered or not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One app: its load, and the headers that identify it."""

    name: str
    qos: str
    load: float
    """Part of the service's capacity."""
    deadline_s: float
    headers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and its outcome."""

    app: str
    sent_s: float
    """Since the storm began."""
    seconds: float
    status: int
    """Of HTTP; 0 where the connection broke."""
    in_time: bool

    @property
    def refused(self) -> bool:
        """At the door, with a Retry-After."""
        return self.status in (429, 503)


class Images:
    """Images that no cache holds: coarse random patches."""

    def __init__(self, edge: int, kind: str = "PNG") -> None:
        self._edge = edge
        self._kind = kind
        self._count = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        import io

        from PIL import Image

        self._count += 1
        patches = np.random.default_rng(self._count).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(patches).resize((self._edge, self._edge), Image.Resampling.NEAREST).save(
            out, self._kind
        )
        return out.getvalue()


class Client:
    """Sends images to the service at `url`."""

    def __init__(
        self,
        url: str,
        model: str,
        images: Iterator[bytes],
        by_app: Mapping[str, Iterator[bytes]] = MappingProxyType({}),
    ) -> None:
        """`by_app`: images of single apps, by their names, instead of `images`."""
        self._by_app = by_app
        self._url = url
        self._model = model
        self._images = images
        self.begun_s = 0.0

    def capacity(self, seconds: float, at_once: int) -> float:
        """Images a second with always `at_once` under way, after as long a warm-up."""
        return asyncio.run(self._capacity(seconds, at_once))

    def storm(self, apps: Sequence[App], capacity: float, seconds: float, seed: int) -> list[Asked]:
        """Outcomes of every request of `apps` (Poisson arrivals) over `seconds`."""
        return asyncio.run(self._storm(apps, capacity, seconds, seed))

    async def _capacity(self, seconds: float, at_once: int) -> float:
        done = 0

        async def one_after_another(http: httpx.AsyncClient, end: float) -> None:
            nonlocal done
            while time.monotonic() < end:
                await self._ask(http, _NOBODY, next(self._images))
                done += 1

        async with self._http() as http:
            for _ in ("warm-up", "counted"):
                done, began = 0, time.monotonic()
                await asyncio.gather(*(one_after_another(http, began + seconds) for _ in range(at_once)))
        return done / (time.monotonic() - began)

    async def _storm(self, apps: Sequence[App], capacity: float, seconds: float, seed: int) -> list[Asked]:
        draw = random.Random(seed)
        come: list[tuple[float, App]] = []
        for app in apps:
            at = 0.0
            while (at := at + draw.expovariate(app.load * capacity)) < seconds:
                come.append((at, app))
        come.sort(key=lambda one: one[0])
        images = [next(self._by_app.get(app.name, self._images)) for _, app in come]
        async with self._http() as http:
            self.begun_s = time.monotonic()
            tasks = []
            for (at, app), image in zip(come, images, strict=True):
                await asyncio.sleep(max(0.0, self.begun_s + at - time.monotonic()))
                tasks.append(asyncio.create_task(self._ask(http, app, image)))
            return list(await asyncio.gather(*tasks))

    async def _ask(self, http: httpx.AsyncClient, app: App, image: bytes) -> Asked:
        sent = time.monotonic()
        form = {"model": self._model, "deadline_s": f"{app.deadline_s:g}"}
        headers = {"accept": "application/vnd.safetensors", **app.headers}
        try:
            answer = await http.post("/v1/encode", data=form, files={"image": image}, headers=headers)
            status = answer.status_code
        except httpx.TransportError:
            status = 0
        seconds = time.monotonic() - sent
        return Asked(
            app=app.name,
            sent_s=sent - self.begun_s,
            seconds=seconds,
            status=status,
            in_time=status == 200 and seconds <= app.deadline_s,
        )

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        options: dict[str, Any] = {"limits": limits, "timeout": 120, "trust_env": False}
        return httpx.AsyncClient(base_url=self._url, **options)


_NOBODY = App(name="nobody", qos="", load=0, deadline_s=60, headers={})
