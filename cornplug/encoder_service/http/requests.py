"""Schema and parsing of `POST /v1/encode` requests.

Bodies are parsed off the event loop, because parsing tens of megabytes holds the GIL for tenths of a second.
Large bodies of one class are parsed one after another, so that the event loop and small bodies get their turn
in between.
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
from pydantic import JsonValue
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.http.body_limits import MAX_FRAMES
from cornplug.encoder_service.preprocess.preparer import medium_bytes
from cornplug.encoder_service.preprocess.preprocessor import FrameSampling
from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass

ParsedT = TypeVar("ParsedT")
LARGE_BYTES: Final = 256 << 10
MODALITIES: Final[tuple[Modality, ...]] = ("image", "video", "audio")
_ONE_MEDIUM: Final[list[JsonValue]] = [{"required": [modality]} for modality in MODALITIES]
_MAX_FIELDS: Final = 16
_MAX_FIELD_BYTES: Final = 16 << 10
_VIDEO_URL: Final = "data:video/jpeg;base64,"
_IMAGE_URL: Final = "data:image/jpeg;base64,"
_SHOWN: Final = 200
"""Maximum characters of a client's value that a message repeats."""


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


class _InMemory(MultiPartParser):
    """Multipart parser that keeps media in memory instead of spooling to /tmp. `body_limits` bounds the
    bytes."""

    spool_max_size = 1 << 62


@contextlib.asynccontextmanager
async def _closing(form: FormData) -> AsyncIterator[FormData]:
    try:
        yield form
    finally:
        await form.close()


class Medium(pydantic.BaseModel):
    """One medium, in exactly one of the three fields. The value is base64, a base64 `data:` URL, or an
    `http(s)` URL of a host that the operator allows (by default every public host)."""

    model_config = pydantic.ConfigDict(extra="forbid", json_schema_extra={"oneOf": _ONE_MEDIUM})
    image: str = ""
    video: str = ""
    audio: str = ""

    @pydantic.model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._named()) != 1:
            raise ValueError(f"set exactly one of {', '.join(MODALITIES)}")
        return self

    def _named(self) -> list[Modality]:
        return [modality for modality in MODALITIES if modality in self.model_fields_set]

    def source(self, where: str = "") -> RequestMedium:
        """Return the medium, with the name of its field for messages."""
        modality = self._named()[0]
        return RequestMedium(modality=modality, field=where + modality, content=getattr(self, modality))


class EncodeBody(Medium):
    """The media to encode: one medium, or `items`. In a multipart form the media are files."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "oneOf": [*_ONE_MEDIUM, {"required": ["items"]}],
            "examples": [
                {"model": "llava-hf/llava-1.5-7b-hf", "image": "data:image/png;base64,iVBORw0KGgo="}
            ],
        }
    )
    model: str = pydantic.Field(min_length=1, max_length=1024)
    items: list[Medium] = pydantic.Field(default_factory=list, min_length=1, fail_fast=True)
    """Media of the request. Each result is returned as soon as it is ready, with its `index`."""
    cache_salt: str | None = pydantic.Field(default=None, max_length=256)
    """Salt of the keys. Equal media with different salts never share a key."""
    inline: bool = True
    """Whether to return the data if it is in the host's store. If false, the reply then contains only the
    `key`."""
    deadline_s: float | None = pydantic.Field(default=None, gt=0, le=600, allow_inf_nan=False)
    """Deadline in seconds for all items together, from the receipt of the body."""
    fps: float | None = pydantic.Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """Frames to sample per second of video. For a video sent as images, the frame rate of the images."""
    num_frames: int | None = pydantic.Field(default=None, gt=0, le=100_000)
    """Number of frames to sample from each video, instead of `fps`. By default as the model's engine does."""

    @pydantic.model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._named()) + ("items" in self.model_fields_set) != 1:
            raise ValueError(f"set exactly one of {', '.join(MODALITIES)} and items")
        return self

    def sources(self) -> tuple[RequestMedium, ...]:
        """Return all media, in the given order."""
        if not self.items:
            return (self.source(),)
        return tuple(item.source(f"items.{i}.") for i, item in enumerate(self.items))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMedium:
    """One medium of a request: a file's bytes, or a JSON string."""

    modality: Modality
    field: str
    content: bytes | str

    def url(self) -> str | None:
        """Return the URL to fetch, or None if the request contains the bytes."""
        if isinstance(self.content, str) and self.content[:8].lower().startswith(("http://", "https://")):
            return self.content
        return None

    @property
    def is_frames(self) -> bool:
        """Whether a video was sent as images in vLLM's form, `data:video/jpeg;base64,FRAME,FRAME,...`."""
        return isinstance(self.content, str) and self.content.startswith(_VIDEO_URL)

    def frames(self) -> list[bytes]:
        """Return the encoded frames. Raises EncoderRefused("bad_input")."""
        assert isinstance(self.content, str)
        each = self.content.removeprefix(_VIDEO_URL).split(",", MAX_FRAMES)
        if len(each) > MAX_FRAMES:
            raise _bad(f"{self.field}: more than {MAX_FRAMES} frames")
        return [medium_bytes(self.field, _IMAGE_URL + text) for text in each]

    def data(self) -> bytes:
        """Return the bytes in the request. Raises EncoderRefused("bad_input", "remote_url")."""
        return self.content if isinstance(self.content, bytes) else medium_bytes(self.field, self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A validated request. If `many` is set, the client wants each result as soon as it is ready."""

    model: str
    sources: tuple[RequestMedium, ...]
    many: bool
    cache_salt: str | None
    inline: bool
    deadline_s: float | None
    sampling: FrameSampling
    """Frame sampling of its videos."""


async def read(request: Request, parser: BodyParser, qos: ServiceClass, *, max_items: int) -> ParsedRequest:
    """Read and parse the request. Raises EncoderRefused: "media_type", "too_many_items" or "bad_input"."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        asked = await _read_form(request, max_items)
    elif kind == "application/json":
        body = await parser.parse(request, _validate, qos)
        asked = _asked(body, body.sources(), many=bool(body.items))
    else:
        raise EncoderRefused(
            f"content-type: {kind[:_SHOWN]!r} is not supported; send multipart/form-data or application/json",
            reason="media_type",
        )
    if len(asked.sources) > max_items:
        raise _too_many(max_items)
    return asked


async def _read_form(request: Request, max_items: int) -> ParsedRequest:
    sources: list[RequestMedium] = []
    fields: dict[str, str] = {}
    try:
        parser = _InMemory(
            request.headers,
            request.stream(),
            max_files=max_items + 1,
            max_fields=_MAX_FIELDS,
            max_part_size=_MAX_FIELD_BYTES,
        )
        async with _closing(await parser.parse()) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) and name in MODALITIES:
                    sources.append(RequestMedium(modality=name, field=name, content=await value.read()))
                elif isinstance(value, UploadFile) or name in MODALITIES:
                    raise _bad(f"{name[:_SHOWN]}: send the medium as a file named image, video or audio")
                elif name in fields:
                    raise _bad(f"{name[:_SHOWN]}: set twice")
                else:
                    fields[name] = value
    except MultiPartException as e:
        if e.message.startswith("Too many files"):
            raise _too_many(max_items) from e
        raise _bad(f"form: {e.message[:_SHOWN]}") from e
    if not sources:
        raise _bad("image: send the medium as a file named image, video or audio")
    # Only the fields are validated here, because the media are in files.
    body = _validate({**fields, sources[0].modality: ""})
    return _asked(body, tuple(sources), many=len(sources) > 1)


def _asked(body: EncodeBody, sources: tuple[RequestMedium, ...], *, many: bool) -> ParsedRequest:
    sampling = FrameSampling(fps=body.fps, num_frames=body.num_frames)
    if sampling != FrameSampling() and all(source.modality != "video" for source in sources):
        raise _bad("fps, num_frames: this request has no video")
    return ParsedRequest(
        model=body.model,
        sources=sources,
        many=many,
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
        where = ".".join(str(part) for part in first["loc"])[:_SHOWN] or "body"
        raise _bad(f"{where}: {first['msg'][:_SHOWN]}") from None


def _bad(message: str) -> EncoderRefused:
    return EncoderRefused(message, reason="bad_input")


def _too_many(max_items: int) -> EncoderRefused:
    return EncoderRefused(
        f"items: at most {max_items} per request; split them into several requests", reason="too_many_items"
    )
