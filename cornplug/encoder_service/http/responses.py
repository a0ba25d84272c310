"""HTTP replies: an embedding as JSON or as a safetensors file, or a refusal as JSON."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from fastapi import Response
from fastapi.responses import JSONResponse

from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply, status_of
from cornplug.errors import EncoderRefused, MediaError


class EncodeAnswer(pydantic.BaseModel):
    """An embedding. `data` is base64 of a C-contiguous little-endian tensor."""

    key: str = pydantic.Field(examples=["5e" * 32])
    shape: list[int] | None = pydantic.Field(examples=[[576, 4096]])
    """(rows, hidden_size). Null if `data` is omitted because the store has the entry."""
    dtype: str = pydantic.Field(examples=["bfloat16"])
    origin: Literal["computed", "coalesced", "cached"]
    stored: bool
    service_time_s: float
    handle: str | None = None
    """Embedding handle. An engine with the same secret accepts the handle in place of the image (see
    `EmbeddingRef.to_vllm_content_part`). Null if the model was reloaded during the request."""
    data: str | None = None


class ErrorDetail(pydantic.BaseModel):
    """Refusal. `reason` is one of a fixed set, and `message` names the field and the remedy."""

    reason: str = pydantic.Field(examples=["bad_input"])
    message: str = pydantic.Field(examples=["image: not base64"])
    retry_after_s: float | None = None


class ErrorAnswer(pydantic.BaseModel):
    """Body of every response with a status other than 200."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMedia:
    """Reply with the embedding of one media item."""

    reply: EncodeReply
    dtype: str
    handle: str | None

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields of `EncodeAnswer` without the data."""
        tensor = self.reply.tensor
        return {
            "key": self.reply.key.hex(),
            "shape": list(tensor.shape) if tensor is not None else None,
            "dtype": self.dtype,
            "origin": self.reply.origin,
            "stored": self.reply.stored,
            "service_time_s": round(self.reply.service_time_s, 6),
            "handle": self.handle,
        }

    def fields(self) -> dict[str, Any]:
        """Return the fields of `EncodeAnswer`."""
        tensor = self.reply.tensor
        data = base64.b64encode(tensor.data).decode() if tensor is not None else None
        return {**self.metadata_fields(), "data": data}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRefusal:
    """Refusal of one media item."""

    reason: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def from_error(cls, error: EncodeRefusal | EncoderRefused | MediaError) -> HttpRefusal:
        if isinstance(error, EncodeRefusal):
            return cls(reason=error.reason, message=error.message, retry_after_s=error.retry_after_s)
        retry_after_s = error.retry_after_s if isinstance(error, EncoderRefused) else None
        return cls(reason=error.reason, message=str(error), retry_after_s=retry_after_s)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ErrorAnswer`."""
        detail: dict[str, Any] = {"reason": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            detail["retry_after_s"] = round(self.retry_after_s, 3)
        return {"error": detail}


Outcome = EncodedMedia | HttpRefusal


def build_response(outcome: Outcome, accept: str) -> Response:
    """Return the HTTP response: a safetensors file if `accept` allows it, otherwise JSON."""
    if isinstance(outcome, HttpRefusal):
        return refusal_response(outcome)
    tensor = outcome.reply.tensor
    if engine_seal.EMBEDDING_MEDIA_TYPE in accept and tensor is not None:
        return Response(
            engine_seal.pack_embedding(outcome.metadata_fields(), tensor),
            media_type=engine_seal.EMBEDDING_MEDIA_TYPE,
        )
    return JSONResponse(outcome.fields())


def refusal_response(refusal: HttpRefusal) -> JSONResponse:
    """Return the HTTP response for a refusal, with the status of its reason."""
    status = status_of(refusal.reason)
    headers = {}
    if refusal.retry_after_s is not None or status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s or 0)))
    return JSONResponse(refusal.fields(), status_code=status, headers=headers)
