"""A service's HTTP answers, read: an embedding, a list of models, or the error that a client raises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cornplug.encoder_service.client.embedding_ref import EmbeddingRef, from_store
from cornplug.encoder_service.wire.status_codes import status_of
from cornplug.errors import EncoderRefused, EncoderUnavailable
from cornplug.store.base import Store

RAW: Final = "application/octet-stream"
_BUSY: Final = frozenset({429, 503})
"""Full, a class over its share, or draining: another service may do it, or this one later."""
_FAILED: Final = frozenset({500, 504})
"""It could not do this one, or not in its time; another one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """Status, headers (names in lower case) and body, read whole."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes


class RetryLater(Exception):
    """The service is alive and asks to be left alone: `refusal` is what a caller would see."""

    def __init__(self, refusal: EncoderRefused, retry_after_s: float | None) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.retry_after_s = retry_after_s


class RemoteFailure(Exception):
    """The service is alive and has failed at this request: `refusal` is what a caller would see."""

    def __init__(self, refusal: EncoderRefused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def embedding(answer: HttpAnswer, store: Store | None) -> EmbeddingRef | None:
    """None where the data is neither in the answer nor, any more, in the store.

    Raises EncoderUnavailable("encoder_bad_response") and whatever `check` raises.
    """
    check(answer)
    try:
        if answer.headers.get("content-type", "").startswith(RAW):
            return EmbeddingRef.inline(
                key=bytes.fromhex(answer.headers["x-cornplug-key"]),
                shape=tuple(int(n) for n in answer.headers["x-cornplug-shape"].split(",")),
                dtype=answer.headers["x-cornplug-dtype"],
                origin=answer.headers["x-cornplug-origin"],
                service_time_s=float(answer.headers["x-cornplug-service-time-s"]),
                data=answer.body,
                handle=answer.headers.get("x-cornplug-handle"),
            )
        meta = msgspec.json.decode(answer.body)
        if store is None:
            return None
        return from_store(
            store,
            bytes.fromhex(meta["key"]),
            origin=str(meta["origin"]),
            service_time_s=float(meta["service_time_s"]),
            handle=meta.get("handle"),
        )
    except (KeyError, ValueError, TypeError) as e:
        raise _garbage(answer, repr(e)) from e


def models(answer: HttpAnswer) -> list[dict[str, Any]]:
    """The rows of `/v1/models`. Raises as `embedding`."""
    check(answer)
    try:
        return list(msgspec.json.decode(answer.body)["models"])
    except (KeyError, ValueError, TypeError) as e:
        raise _garbage(answer, repr(e)) from e


def check(answer: HttpAnswer) -> None:
    """Pass a 200. Raises Busy (429, 503, and what names a Retry-After), Failed (500, 504), EncoderRefused
    (the service's reason and message) or EncoderUnavailable("encoder_bad_response")."""
    if answer.status == 200:
        return
    try:
        error = msgspec.json.decode(answer.body)["error"]
        refusal = EncoderRefused(str(error["message"]), reason=str(error["reason"]))
        precise = error.get("retry_after_s")
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise _garbage(answer, f"HTTP {answer.status}") from e
    retry_after_s = _seconds(precise)
    if retry_after_s is None:
        retry_after_s = _seconds(answer.headers.get("retry-after"))
    if answer.status in _BUSY or (answer.status in _FAILED and retry_after_s is not None):
        raise RetryLater(refusal, retry_after_s)
    if answer.status in _FAILED:
        raise RemoteFailure(refusal)
    raise refusal


def status_in(body: bytes) -> int:
    """The status that a streamed part's JSON would have had as an answer of its own."""
    try:
        error = msgspec.json.decode(body).get("error")
        return 200 if error is None else status_of(str(error["reason"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return 502


def _seconds(value: object) -> float | None:
    """A Retry-After in seconds; None for none, or a date, which no service of ours sends."""
    try:
        seconds = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _garbage(answer: HttpAnswer, why: str) -> EncoderUnavailable:
    return EncoderUnavailable(f"{answer.url} is no encoder service: {why}", reason="encoder_bad_response")
