"""The same requests by the sync and the async client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from cornplug.apps import Application, RequestSpec

Kind = Literal["sync", "async"]
ASK: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Tell me a story."}]}
APP = Application(name="chat", llm="m", requests=[RequestSpec(name="text", rate=1.0)])


def chat(
    kind: Kind, routes: Any, *requests: dict[str, Any], app: Application = APP, **options: Any
) -> list[Any]:
    """Answers, one after the other by one client; those of streams are lists of chunks."""
    return _all(kind, routes, "chat", requests or (ASK,), app, options)


def complete(kind: Kind, routes: Any, *requests: dict[str, Any], **options: Any) -> list[Any]:
    """As `chat`, of the API for completions."""
    return _all(kind, routes, "completions", requests, APP, options)


def respond(kind: Kind, routes: Any, *requests: dict[str, Any], **options: Any) -> list[Any]:
    """As `chat`, of the API for responses."""
    return _all(kind, routes, "responses", requests, APP, options)


def models(kind: Kind, routes: Any, **options: Any) -> Any:
    """The answer of /v1/models."""
    return _all(kind, routes, "models", ({},), APP, options)[0]


def text_of(chunks: Sequence[Any]) -> str:
    """A stream's text."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join((c.delta.content if hasattr(c, "delta") else c.text) or "" for c in choices)


def _all(
    kind: Kind, routes: Any, api: str, requests: Sequence[dict[str, Any]], app: Application, options: Any
) -> list[Any]:
    if kind == "sync":
        with app.client(routes=routes, **options) as client:
            return [_sync(client, api, request) for request in requests]

    async def ask() -> list[Any]:
        async with app.async_client(routes=routes, **options) as client:
            return [await _async(client, api, request) for request in requests]

    return asyncio.run(ask())


def _method(client: Any, api: str) -> Any:
    if api == "models":
        return client.models.list
    return (client.chat.completions if api == "chat" else getattr(client, api)).create


def _sync(client: Any, api: str, request: dict[str, Any]) -> Any:
    answer = _method(client, api)(**request)
    return list(answer) if request.get("stream") else answer


async def _async(client: Any, api: str, request: dict[str, Any]) -> Any:
    answer = await _method(client, api)(**request)
    return [chunk async for chunk in answer] if request.get("stream") else answer
