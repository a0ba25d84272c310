"""A service in this process, and a client of its ASGI application."""

from __future__ import annotations

from typing import Any

import anyio
import httpx

from cornplug.config import Config
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.app import create_app

from .conftest import SECRET


class Service:
    """`config` makes its limits."""

    def __init__(self, encoder: EncoderCore, config: Config) -> None:
        self.encoder = encoder
        self.config = config
        self.gate = DrainState()
        self.app = create_app(encoder, config.encoder, secret=SECRET, drain_state=self.gate)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
                return await client.request(method, path, **options)

        return anyio.run(send)

    def post(self, **options: Any) -> httpx.Response:
        return self.call("POST", "/v1/encode", **options)
