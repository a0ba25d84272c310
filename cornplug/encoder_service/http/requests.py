"""Schema and parsing of `POST /v1/encode` requests, and limits on the size, time, number and shape of bodies.

Bodies are parsed on threads, because parsing tens of megabytes takes tenths of a second. Parsing also holds
the GIL. Therefore the large bodies of one class are parsed one after another, so that the event loop and the
parsing of small bodies can run in between.

If a client does not read its reply, the kernel ends the connection, because `server.BoundListeners` sets
TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import pydantic
from fastapi import Request
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug.checkpoints.families import Modality
from cornplug.config import EncoderConfig
from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.http.access_control import ENGINE_CLASS, SEAL_SCOPE_KEY
from cornplug.encoder_service.http.responses import HttpRefusal, refusal_response
from cornplug.encoder_service.preprocess.decode_lanes import ByteBudget
from cornplug.encoder_service.preprocess.preparer import media_bytes
from cornplug.encoder_service.preprocess.preprocessor import FrameSampling
from cornplug.errors import EncoderRefused
from cornplug.qos import QosClasses, ServiceClass

ParsedT = TypeVar("ParsedT")
LARGE_BYTES: Final = 256 << 10
MODALITIES: Final[tuple[Modality, ...]] = ("image", "video", "audio")
_MAX_FIELDS: Final = 16
_MAX_FIELD_BYTES: Final = 16 << 10
_VIDEO_URL: Final = "data:video/jpeg;base64,"
_IMAGE_URL: Final = "data:image/jpeg;base64,"
_MAX_SHOWN_CHARS: Final = 200
"""Maximum number of characters of a client's value in an error message."""
BODY_DEADLINE_S: Final = 30.0
"""Maximum seconds for receiving the body of an HTTP request."""
_MAX_BODIES_BYTES: Final = 1 << 30
"""Maximum total bytes of bodies in memory, unless `_MIN_BODIES` bodies need more. Half of it is divided
among the service classes by their shares, and a quarter is reserved for engines."""
_MIN_BODIES: Final = 4
"""Minimum capacity of the budget, as a number of bodies of the maximum size."""
MAX_VIDEO_IMAGES: Final = 4096
"""Maximum number of images in a video that is sent as images."""
_FORM_OVERHEAD_BYTES: Final = 64 << 10
_SMALL_BYTES: Final = 64 << 10
"""Maximum bytes of a body on a route that does not accept media."""
_MAX_MEDIA: Final = 256
"""Maximum number of media items in one request. Only SGLang's servers send several
(`sglang_delivery.EncodePart`)."""
_QUOTES_PER_ITEM: Final = 32
"""Maximum number of quotation marks for one media item. An item has at most five fields, each with four
quotation marks for its name and value."""
_BRACKETS_PER_ITEM: Final = 4
_ENGINE_FRACTION: Final = 0.25
_CLASS_FRACTION: Final = 0.5


class BodyParser:
    """Parses bodies on `threads`. Use it from one event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._locks: dict[ServiceClass, asyncio.Lock] = {}

    async def parse(
        self, request: Request, function: Callable[[bytes], ParsedT], qos: ServiceClass
    ) -> ParsedT:
        """Read the whole body, call `function` with it on a thread, and return the result.

        Raises the errors of `function`, and ClientDisconnect.
        """
        body = b"".join([piece async for piece in request.stream()])
        large = len(body) > LARGE_BYTES
        turn = self._locks.setdefault(qos, asyncio.Lock()) if large else contextlib.nullcontext()
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, body)


class _InMemoryFormParser(MultiPartParser):
    """Multipart parser that keeps media in memory instead of writing them to /tmp. `BodyLimitMiddleware`
    limits the number of bytes."""

    spool_max_size = 1 << 62


@contextlib.asynccontextmanager
async def _closing(form: FormData) -> AsyncIterator[FormData]:
    try:
        yield form
    finally:
        await form.close()


class EncodeBody(pydantic.BaseModel):
    """Media item to encode, in exactly one of the fields `image`, `video` and `audio`. The value is base64, a
    base64 `data:` URL, or an `http(s)` URL of a host that the operator allows (by default every public host).
    In a multipart form, the item is a file."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "oneOf": [{"required": [modality]} for modality in MODALITIES],
            "examples": [
                {"model": "llava-hf/llava-1.5-7b-hf", "image": "data:image/png;base64,iVBORw0KGgo="}
            ],
        },
    )
    image: str = ""
    video: str = ""
    audio: str = ""
    model: str = pydantic.Field(min_length=1, max_length=1024)
    cache_salt: str | None = pydantic.Field(default=None, max_length=256)
    """Salt of the keys. Equal media items with different salts never share a key."""
    inline: bool = True
    """Whether to return the data if it is in the host's store. If false, the reply then contains only the
    `key`."""
    deadline_s: float | None = pydantic.Field(default=None, gt=0, le=600, allow_inf_nan=False)
    """Deadline in seconds from the receipt of the body. Values above 120 count as 120."""
    fps: float | None = pydantic.Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """Number of frames to sample per second of video. For a video that is sent as images, their frame
    rate."""
    num_frames: int | None = pydantic.Field(default=None, gt=0, le=100_000)
    """Number of frames to sample from a video, instead of `fps`. By default the same as in the model's
    engine."""

    @pydantic.model_validator(mode="after")
    def _check_one_modality(self) -> Self:
        if sum(modality in self.model_fields_set for modality in MODALITIES) != 1:
            raise ValueError(f"set exactly one of {', '.join(MODALITIES)}")
        return self

    def request_media(self) -> RequestMediaItem:
        """Return the media item."""
        (modality,) = (modality for modality in MODALITIES if modality in self.model_fields_set)
        return RequestMediaItem(modality=modality, content=getattr(self, modality))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMediaItem:
    """Media item of a request: the bytes of a file, or a JSON string (base64 or a URL)."""

    modality: Modality
    content: bytes | str
    suffix: str = ""
    """Suffix of the field's name, after the modality."""

    @property
    def field(self) -> str:
        """Name of the field that contains the media item, for messages."""
        return self.modality + self.suffix

    def remote_url(self) -> str | None:
        """Return the URL to fetch, or None if the request contains the bytes."""
        if isinstance(self.content, str) and self.content[:8].lower().startswith(("http://", "https://")):
            return self.content
        return None

    @property
    def is_frames(self) -> bool:
        """Whether a video was sent as images, in vLLM's form `data:video/jpeg;base64,FRAME,FRAME,...`."""
        return isinstance(self.content, str) and self.content.startswith(_VIDEO_URL)

    def read_frames(self) -> list[bytes]:
        """Return the frames as bytes of encoded images. Raises EncoderRefused("bad_input")."""
        assert isinstance(self.content, str)
        each = self.content.removeprefix(_VIDEO_URL).split(",", MAX_VIDEO_IMAGES)
        if len(each) > MAX_VIDEO_IMAGES:
            raise _bad_input(f"{self.field}: more than {MAX_VIDEO_IMAGES} frames")
        return [media_bytes(self.field, _IMAGE_URL + text) for text in each]

    def read_bytes(self) -> bytes:
        """Return the item's bytes from the request. Raises EncoderRefused("bad_input") or ("remote_url")."""
        return self.content if isinstance(self.content, bytes) else media_bytes(self.field, self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """Validated request to `/v1/encode`, or an engine's request in the same form."""

    model: str
    media: RequestMediaItem
    cache_salt: str | None
    inline: bool
    deadline_s: float | None
    sampling: FrameSampling
    """Frames to sample, if the media item is a video."""


async def read_request(request: Request, parser: BodyParser, qos: ServiceClass) -> ParsedRequest:
    """Read and parse the request. Raises EncoderRefused("media_type") or EncoderRefused("bad_input")."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _read_form(request)
    if kind == "application/json":
        body = await parser.parse(request, _validate, qos)
        return _build_request(body, body.request_media())
    raise EncoderRefused(
        f"content-type: {kind[:_MAX_SHOWN_CHARS]!r} is not supported; "
        "send multipart/form-data or application/json",
        reason="media_type",
    )


async def _read_form(request: Request) -> ParsedRequest:
    source: RequestMediaItem | None = None
    fields: dict[str, str] = {}
    try:
        parser = _InMemoryFormParser(
            request.headers,
            request.stream(),
            max_files=1,
            max_fields=_MAX_FIELDS,
            max_part_size=_MAX_FIELD_BYTES,
        )
        async with _closing(await parser.parse()) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) and name in MODALITIES:
                    source = RequestMediaItem(modality=name, content=await value.read())
                elif isinstance(value, UploadFile) or name in MODALITIES:
                    raise _bad_input(
                        f"{name[:_MAX_SHOWN_CHARS]}: send the medium as a file named image, video or audio"
                    )
                elif name in fields:
                    raise _bad_input(f"{name[:_MAX_SHOWN_CHARS]}: set twice")
                else:
                    fields[name] = value
    except MultiPartException as e:
        if e.message.startswith("Too many files"):
            raise _bad_input("form: send one file in each request") from e
        raise _bad_input(f"form: {e.message[:_MAX_SHOWN_CHARS]}") from e
    if source is None:
        raise _bad_input("image: send the medium as a file named image, video or audio")
    # The media item is in a file. An empty string replaces it, so only the other fields are validated.
    return _build_request(_validate({**fields, source.modality: ""}), source)


def _build_request(body: EncodeBody, media: RequestMediaItem) -> ParsedRequest:
    sampling = FrameSampling(fps=body.fps, num_frames=body.num_frames)
    if sampling != FrameSampling() and media.modality != "video":
        raise _bad_input("fps, num_frames: this request has no video")
    return ParsedRequest(
        model=body.model,
        media=media,
        cache_salt=body.cache_salt,
        inline=body.inline,
        deadline_s=body.deadline_s,
        sampling=sampling,
    )


def _validate(value: bytes | Mapping[str, Any]) -> EncodeBody:
    try:
        if isinstance(value, bytes):
            return EncodeBody.model_validate_json(value, strict=True)
        return EncodeBody.model_validate(value)
    except pydantic.ValidationError as e:
        first = e.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:_MAX_SHOWN_CHARS] or "body"
        raise _bad_input(f"{where}: {first['msg'][:_MAX_SHOWN_CHARS]}") from None


def _bad_input(message: str) -> EncoderRefused:
    return EncoderRefused(message, reason="bad_input")


class JsonMarkLimit:
    """Counts the quotation marks, brackets and commas in a JSON text that arrives in pieces.

    The number of these marks limits the number and depth of the values. `add` raises
    EncoderRefused("too_large") if there are more marks than a valid request can have.
    """

    def __init__(self) -> None:
        quotes = _QUOTES_PER_ITEM * _MAX_MEDIA
        self._remaining = {
            (b'"',): quotes,
            (b"[", b"{"): _BRACKETS_PER_ITEM * _MAX_MEDIA,
            (b",",): MAX_VIDEO_IMAGES * _MAX_MEDIA + quotes,
        }

    def add(self, piece: bytes) -> None:
        """Count the marks in the next piece of the text."""
        for marks, left in self._remaining.items():
            left -= sum(map(piece.count, marks))
            if left < 0:
                raise EncoderRefused("body: more values than a request can have", reason="too_large")
            self._remaining[marks] = left


def body_budget(classes: QosClasses, config: EncoderConfig) -> ByteBudget:
    """Return the budget for the bytes of bodies in memory."""
    return ByteBudget(
        {qos: _CLASS_FRACTION * qos.share for qos in classes.ranked_classes()}
        | {ENGINE_CLASS: _ENGINE_FRACTION},
        max(_MAX_BODIES_BYTES, _MIN_BODIES * (config.max_body_bytes + _FORM_OVERHEAD_BYTES)),
        purpose="to receive it",
    )


class BodyLimitMiddleware:
    """Middleware that limits bodies. A refused request gets a JSON reply, and its connection is closed.

    head   Content-Length must not exceed the path's limit.
    body   Each piece is checked before it is kept. The limits apply to the bytes of the body, to the bytes of
           all bodies of its class, and for JSON to the number of values, because a parser's objects are fifty
           times as large as the text.
    time   The whole body must arrive within `BODY_DEADLINE_S` seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        classes: QosClasses,
        held: ByteBudget,
        max_bytes: int,
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create the middleware.

        Args:
            held: Budget for the bytes of bodies in memory.
            max_bytes: Maximum bytes of a body with media.
            count: Function that is called with the reason if a request is refused because of its
                Content-Length.
        """
        self._app = app
        self._count_refusal = count
        self._classes = classes
        self._max_bytes = max_bytes + _FORM_OVERHEAD_BYTES
        self._budget = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        max_bytes = self._max_bytes if _accepts_media(scope["path"]) else _SMALL_BYTES
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > max_bytes:
            self._count_refusal("too_large")
            await refusal_response(HttpRefusal.from_error(_too_large(max_bytes)))(scope, receive, send)
            return
        shape = None if _is_opaque(scope["path"], headers) else JsonMarkLimit()
        qos = ENGINE_CLASS if SEAL_SCOPE_KEY in scope else self._classes.identify_caller(headers).qos
        end = asyncio.get_running_loop().time() + BODY_DEADLINE_S
        seen = 0
        whole = False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                # The body is complete. This call only waits for a disconnect, at any time before the reply.
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                problem = f"body: not complete after {BODY_DEADLINE_S:g} s"
                raise EncoderRefused(problem, reason="slow_body") from None
            whole = not message.get("more_body", False)
            piece = message.get("body", b"")
            seen += len(piece)
            if seen > max_bytes:
                raise _too_large(max_bytes)
            held.resize(seen)
            if shape is not None:
                shape.add(piece)
            return message

        with self._budget.open_share(qos) as held:
            await self._app(scope, counted, send)


def _accepts_media(path: str) -> bool:
    """Return whether the path is /v1/encode, /v1/engine, or SGLang's /encode and /sglang/MODEL/encode."""
    return path.endswith("/encode") or path == engine_seal.ENGINE_PATH


def _is_opaque(path: str, headers: Headers) -> bool:
    """Return whether the body is a form or sealed bytes. All other bodies are parsed as JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "multipart/form-data" or path == engine_seal.ENGINE_PATH


def _too_large(max_bytes: int) -> EncoderRefused:
    return EncoderRefused(f"body: larger than the limit of {max_bytes} bytes", reason="too_large")
