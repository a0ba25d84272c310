"""Cancellation of work when the client disconnects, which uvicorn does not do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

ResultT = TypeVar("ResultT")


async def unless_gone(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of the work. Raises ClientDisconnect as soon as the client disconnects."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
