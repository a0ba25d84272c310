"""The HTTP face: pictures in, embeddings out. Every digest and key is computed here.

    POST /v1/encode   multipart (model, image, salt, inline) or JSON {model, image, salt, inline}
    GET  /v1/models   GET /health   GET /metrics   GET /openapi.json
    POST /encode ...  SGLang's language-only servers, see `sglang_epd`

Nothing is ever fetched: an image is bytes, base64 or a data URL. A client gives no ids.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pydantic
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug import __version__
from cornplug.config import EncoderConfig
from cornplug.encoder_service import sglang_epd
from cornplug.encoder_service.preparing import Preparer, medium_bytes
from cornplug.encoder_service.protocol import Encoded, Refused, Tensor
from cornplug.encoder_service.refusals import status_of
from cornplug.encoder_service.tracing import TraceRequests
from cornplug.encoder_service.worker import Encoder
from cornplug.errors import EncoderRefused, MediaError

RAW: Final = "application/octet-stream"
_FORM_OVERHEAD_BYTES: Final = 64 << 10


class EncodeBody(pydantic.BaseModel):
    """What to encode. In a multipart form, `image` is the file and the others are fields."""

    model_config = pydantic.ConfigDict(extra="forbid")
    model: str
    image: str
    """Base64, or a `data:` URL with base64."""
    salt: str | None = pydantic.Field(default=None, max_length=256)
    """Tenant: equal pictures of different salts never share a key."""
    inline: bool = True
    """False: leave the data out where the host's store has it under `key`."""
    deadline_s: float | None = pydantic.Field(default=None, gt=0, le=600)


class EncodeAnswer(pydantic.BaseModel):
    """An embedding. `data` is base64 of a C-contiguous little-endian tensor."""

    key: str
    shape: list[int] | None
    """(rows, hidden_size); None where `data` is left out: the store's entry tells it."""
    dtype: str
    tower: str
    stored: bool
    seconds: float
    data: str | None = None


class ModelRow(pydantic.BaseModel):
    """One served model; fingerprints in hex."""

    name: str
    family: str
    identity: str
    tower_fp: str
    projector_fp: str
    spec_fp: str
    dtype: str
    hidden_size: int


class ModelList(pydantic.BaseModel):
    models: list[ModelRow]


def create_app(encoder: Encoder, config: EncoderConfig, *, secret: bytes) -> FastAPI:
    """The ASGI application over an encoder. Limits are `config`'s."""
    # Decoding and preprocessing are Python and C on bytes: two threads keep the towers fed.
    preparer = Preparer(encoder.registry, secret=secret, max_pixels=config.max_pixels)
    threads = ThreadPoolExecutor(2, "cornplug-prepare")
    parts = sglang_epd.SglangParts(encoder, preparer, threads, config, secret=secret)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with parts.running():
            yield

    app = FastAPI(title="cornplug encoder", version=__version__, lifespan=lifespan)
    app.include_router(sglang_epd.router(parts, encoder))
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(TraceRequests, tracing=encoder.observer.tracing)
    body_schema = EncodeBody.model_json_schema()
    file_schema = {"type": "string", "format": "binary"}
    form_schema = {**body_schema, "properties": {**body_schema["properties"], "image": file_schema}}

    @app.post(
        "/v1/encode",
        response_model=EncodeAnswer,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": body_schema},
                    "multipart/form-data": {"schema": form_schema},
                },
            }
        },
    )
    async def encode(request: Request) -> Response:
        caller = encoder.classes.of_headers(request.headers)
        try:
            body, data = await _read(request)
            deadline_s = body.deadline_s or caller.qos.deadline_s or config.deadline_s
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(
                threads,
                lambda: preparer.prepare(body.model, "image", data, salt=body.salt, deadline_s=deadline_s),
            )
        except (EncoderRefused, MediaError) as e:
            encoder.meters.refused(e.reason, caller.qos.name)
            return _error(e.reason, str(e))
        # Cancelled with the request's task, so that no tower runs for a client that has gone.
        submitted = encoder.submit(prepared.request, inline=body.inline, caller=caller)
        answer = await asyncio.wrap_future(submitted)
        if isinstance(answer, Refused):
            return _error(answer.reason, answer.message, answer.retry_after_s)
        return _answer(answer, request.headers.get("accept", ""), prepared.dtype)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(
            models=[
                ModelRow(
                    name=m.name,
                    family=m.family,
                    identity=m.identity.hex(),
                    tower_fp=m.tower_fp.hex(),
                    projector_fp=m.projector_fp.hex(),
                    spec_fp=m.spec_fp.hex(),
                    dtype=m.dtype,
                    hidden_size=m.hidden_size,
                )
                for m in encoder.registry.served()
            ]
        )

    @app.get("/health")
    @app.get("/sglang/{model:path}/health", include_in_schema=False)
    async def health() -> Response:
        up = encoder.healthy()
        return JSONResponse({"status": "ok" if up else "down"}, status_code=200 if up else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(encoder.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class BodyLimit:
    """ASGI middleware: a body over `max_bytes` is refused by its header, or where it passes."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes + _FORM_OVERHEAD_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            refusal = _error("too_large", f"body of {int(length)} bytes, at most {self._max_bytes}")
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise EncoderRefused(f"body exceeds {self._max_bytes} bytes", reason="too_large")
            return message

        await self._app(scope, counted, send)


async def _read(request: Request) -> tuple[EncodeBody, bytes]:
    """The checked body and the picture's bytes. Raises EncoderRefused with the field's name."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                upload = form.get("image")
                if not isinstance(upload, UploadFile):
                    raise EncoderRefused("image: send the picture as a file", reason="bad_input")
                fields = {name: value for name, value in form.items() if name != "image"}
                return _validate({**fields, "image": ""}), await upload.read()
        except HTTPException as e:  # Starlette's form for a body that is no multipart
            raise EncoderRefused(f"form: {e.detail}", reason="bad_input") from e
    if kind == "application/json":
        body = _validate(await request.body())
        return body, medium_bytes("image", body.image)
    raise EncoderRefused(
        f"content-type {kind!r}: send multipart/form-data or application/json", reason="bad_input"
    )


def _validate(value: bytes | dict[str, Any]) -> EncodeBody:
    try:
        if isinstance(value, bytes):
            return EncodeBody.model_validate_json(value)
        return EncodeBody.model_validate(value)
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise EncoderRefused(f"{where}: {first['msg']}", reason="bad_input") from None


def _answer(answer: Encoded, accept: str, dtype: str) -> Response:
    tensor: Tensor | None = answer.tensor
    meta: dict[str, Any] = {
        "key": answer.key.hex(),
        "shape": list(tensor.shape) if tensor is not None else None,
        "dtype": dtype,
        "tower": answer.tower,
        "stored": answer.stored,
        "seconds": round(answer.seconds, 6),
    }
    if RAW in accept and tensor is not None:
        headers = {
            f"x-cornplug-{name}": ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in meta.items()
        }
        return Response(tensor.data, media_type=RAW, headers=headers)
    data = base64.b64encode(tensor.data).decode() if tensor is not None else None
    return JSONResponse({**meta, "data": data})


def _error(reason: str, message: str, retry_after_s: float | None = None) -> JSONResponse:
    headers = {} if retry_after_s is None else {"retry-after": str(math.ceil(retry_after_s))}
    content: dict[str, Any] = {"error": {"reason": reason, "message": message}}
    if retry_after_s is not None:
        content["error"]["retry_after_s"] = round(retry_after_s, 3)
    return JSONResponse(content, status_code=status_of(reason), headers=headers)
