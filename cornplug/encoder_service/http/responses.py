"""HTTP replies: embeddings as JSON, raw bytes, lines or parts, and refusals in one JSON form."""

from __future__ import annotations

import base64
import json
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import pydantic
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cornplug.encoder_service.wire.messages import EncodeRefusal, EncodeReply
from cornplug.encoder_service.wire.status_codes import status_of
from cornplug.errors import EncoderRefused, MediaError

RAW: Final = "application/octet-stream"
LINES: Final = "application/x-ndjson"
PARTS: Final = "multipart/mixed"


class EncodeAnswer(pydantic.BaseModel):
    """An embedding. `data` is base64 of a C-contiguous little-endian tensor."""

    key: str = pydantic.Field(examples=["5e" * 32])
    shape: list[int] | None = pydantic.Field(examples=[[576, 4096]])
    """(rows, hidden_size), or null if `data` is omitted because the store has the entry."""
    dtype: str = pydantic.Field(examples=["bfloat16"])
    origin: Literal["computed", "coalesced", "cached"]
    stored: bool
    service_time_s: float
    handle: str | None = None
    """Embedding handle, which an engine with the same secret accepts in place of the image (see
    `EmbeddingRef.to_vllm_content_part`). Null if the model was reloaded during the request."""
    data: str | None = None


class ErrorDetail(pydantic.BaseModel):
    """A refusal. `reason` is one of a fixed set, and `message` names the field and the remedy."""

    reason: str = pydantic.Field(examples=["bad_input"])
    message: str = pydantic.Field(examples=["image: not base64"])
    retry_after_s: float | None = None


class ErrorAnswer(pydantic.BaseModel):
    """Body of every response with a status other than 200."""

    error: ErrorDetail


class EncodeLine(pydantic.BaseModel):
    """One line of `application/x-ndjson`: `index` with the fields of EncodeAnswer, or with `error`."""

    index: int
    key: str | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    origin: Literal["computed", "coalesced", "cached"] | None = None
    stored: bool | None = None
    service_time_s: float | None = None
    handle: str | None = None
    data: str | None = None
    error: ErrorDetail | None = None


def header(field: str) -> str:
    """Return the HTTP header for a field of `EncodeAnswer`."""
    return f"x-cornplug-{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMedium:
    """Embedding of one medium."""

    answer: EncodeReply
    dtype: str
    handle: str | None

    def meta(self) -> dict[str, Any]:
        """Return all fields except the data."""
        tensor = self.answer.tensor
        return {
            "key": self.answer.key.hex(),
            "shape": list(tensor.shape) if tensor is not None else None,
            "dtype": self.dtype,
            "origin": self.answer.origin,
            "stored": self.answer.stored,
            "service_time_s": round(self.answer.service_time_s, 6),
            "handle": self.handle,
        }

    def fields(self) -> dict[str, Any]:
        """Return all fields, with the data as base64."""
        tensor = self.answer.tensor
        data = base64.b64encode(tensor.data).decode() if tensor is not None else None
        return {**self.meta(), "data": data}

    def headers(self) -> dict[str, str]:
        """Return `meta` as headers, for a reply whose body is the data."""
        return {
            header(name): ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in self.meta().items()
            if value is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMedium:
    """Refusal of one medium."""

    reason: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, refusal: EncodeRefusal | EncoderRefused | MediaError) -> FailedMedium:
        if isinstance(refusal, EncodeRefusal):
            return cls(reason=refusal.reason, message=refusal.message, retry_after_s=refusal.retry_after_s)
        retry_after_s = refusal.retry_after_s if isinstance(refusal, EncoderRefused) else None
        return cls(reason=refusal.reason, message=str(refusal), retry_after_s=retry_after_s)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ErrorAnswer`."""
        detail: dict[str, Any] = {"reason": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            detail["retry_after_s"] = round(self.retry_after_s, 3)
        return {"error": detail}


Outcome = EncodedMedium | FailedMedium


def one(outcome: Outcome, accept: str) -> Response:
    """Return the reply to a request for a single medium."""
    if isinstance(outcome, FailedMedium):
        return refused(outcome)
    tensor = outcome.answer.tensor
    if RAW in accept and tensor is not None:
        return Response(tensor.data, media_type=RAW, headers=outcome.headers())
    return JSONResponse(outcome.fields())


class StreamedEncodings(StreamingResponse):
    """Stream of lines or parts. When the stream ends, also by a disconnect, unfinished work is cancelled."""

    def __init__(self, outcomes: AsyncGenerator[tuple[int, Outcome], None], accept: str) -> None:
        self._outcomes = outcomes
        if PARTS in accept:
            # Random, so that no embedding contains it.
            boundary = secrets.token_hex(16)
            super().__init__(_parts(outcomes, boundary), media_type=f'{PARTS}; boundary="{boundary}"')
        else:
            super().__init__(_lines(outcomes), media_type=LINES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outcomes.aclose()


def wants_many(accept: str) -> bool:
    """Return whether the client accepts a format with several results."""
    return LINES in accept or PARTS in accept


def refused(failed: FailedMedium) -> JSONResponse:
    """Return the response for a refusal, with its status."""
    status = status_of(failed.reason)
    headers = {}
    if failed.retry_after_s is not None or status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(failed.retry_after_s or 0)))
    return JSONResponse(failed.fields(), status_code=status, headers=headers)


async def _lines(outcomes: AsyncIterator[tuple[int, Outcome]]) -> AsyncIterator[bytes]:
    async for index, outcome in outcomes:
        yield json.dumps({"index": index, **outcome.fields()}, separators=(",", ":")).encode() + b"\n"


async def _parts(outcomes: AsyncIterator[tuple[int, Outcome]], boundary: str) -> AsyncIterator[bytes]:
    """Yield the body as in RFC 2046, 5.1.1. A part has the bytes and `x-cornplug-*` headers, or JSON if there
    are no bytes.
    """
    async for index, outcome in outcomes:
        tensor = outcome.answer.tensor if isinstance(outcome, EncodedMedium) else None
        if isinstance(outcome, EncodedMedium) and tensor is not None:
            kind, headers, body = RAW, outcome.headers(), tensor.data
        else:
            kind, headers, body = "application/json", {}, json.dumps(outcome.fields()).encode()
        head = {"content-type": kind, "content-length": str(len(body)), "x-cornplug-index": str(index)}
        lines = [f"--{boundary}", *(f"{name}: {value}" for name, value in (head | headers).items()), "", ""]
        yield "\r\n".join(lines).encode()
        yield bytes(body)
        yield b"\r\n"
    yield f"--{boundary}--\r\n".encode()
