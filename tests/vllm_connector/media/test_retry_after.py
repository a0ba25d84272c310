"""The header that vLLM's exception handlers do not set."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI
from starlette.responses import JSONResponse

from cornplug.vllm_connector.media import served_images


def app() -> FastAPI:
    made = FastAPI()

    @made.get("/{status}/{pause}")
    async def answer(status: int, pause: float) -> JSONResponse:
        async def noted() -> None:
            served_images.set_retry_after(pause)

        # As vLLM's parser does: in a task of its own.
        await asyncio.gather(noted(), noted())
        return JSONResponse({}, status_code=status)

    @made.get("/plain")
    async def plain() -> JSONResponse:
        return JSONResponse({}, status_code=503)

    served_images.RETRY_AFTER_WRAPS[0][2](lambda app: None, made)
    return made


def test_retry_after_is_in_503_answers_that_noted_a_pause() -> None:
    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.get(path)

    assert asyncio.run(get("/503/2.2")).headers["retry-after"] == "3"
    assert asyncio.run(get("/503/0")).headers["retry-after"] == "1"
    assert "retry-after" not in asyncio.run(get("/200/2")).headers
    assert "retry-after" not in asyncio.run(get("/plain")).headers


def test_note_outside_a_request_gives_the_pause_alone() -> None:
    assert served_images.set_retry_after(None) == 1.0
