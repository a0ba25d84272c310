"""Parsing of request bodies off the event loop.

Parsing tens of megabytes holds the GIL for tenths of a second. Large bodies of one class are therefore parsed
one after another, so that the event loop and small bodies get their turn in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from starlette.requests import Request

from cornplug.qos import ServiceClass

ParsedT = TypeVar("ParsedT")
LARGE_BYTES: Final = 256 << 10


class BodyParser:
    """Parser of bodies on `threads`. For one event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._turns: dict[ServiceClass, asyncio.Lock] = {}

    async def parse(
        self, request: Request, function: Callable[[bytes], ParsedT], qos: ServiceClass
    ) -> ParsedT:
        """Return `function` of the whole body, which is not kept.

        Raises what `function` raises, and ClientDisconnect.
        """
        body = b"".join([piece async for piece in request.stream()])
        large = len(body) > LARGE_BYTES
        turn = self._turns.setdefault(qos, asyncio.Lock()) if large else contextlib.nullcontext()
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, body)
