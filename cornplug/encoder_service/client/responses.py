"""Parser of a service's HTTP responses: an embedding, a list of models, or the error to raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cornplug.encoder_service.client.embedding_ref import EmbeddingRef, from_store
from cornplug.encoder_service.client.retry import retry_after_s
from cornplug.encoder_service.wire import embedding_file
from cornplug.errors import EncoderRefused, EncoderUnavailable
from cornplug.store.base import Store

_BUSY: Final = frozenset({429, 503})
"""Statuses of a service that is overloaded or draining, or in which the request's class exceeds its share.
Another service may accept the request now, or the same service later."""
_FAILED: Final = frozenset({500, 504})
"""Statuses of a request that failed or was too late. Another service may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """HTTP response with its complete body. Header names are in lower case."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes


class RetryLater(Exception):
    """Raised if the service is alive but requests a pause. `refusal` is the error to raise to the caller."""

    def __init__(self, refusal: EncoderRefused, retry_after_s: float | None) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.retry_after_s = retry_after_s


class RemoteFailure(Exception):
    """Raised if the service is alive but failed on this request. `refusal` is the error to raise to the
    caller."""

    def __init__(self, refusal: EncoderRefused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def embedding(answer: HttpAnswer, store: Store | None) -> EmbeddingRef | None:
    """Return the embedding, or None if its bytes are neither in the response nor in the store.

    Raises EncoderUnavailable("encoder_bad_response"), and the errors of `check`.
    """
    check(answer)
    try:
        if answer.headers.get("content-type", "").startswith(embedding_file.MEDIA_TYPE):
            meta, data = embedding_file.unpack(answer.body)
            return EmbeddingRef.inline(
                key=bytes.fromhex(meta["key"]),
                shape=tuple(meta["shape"]),
                dtype=str(meta["dtype"]),
                origin=str(meta["origin"]),
                service_time_s=float(meta["service_time_s"]),
                data=data,
                handle=meta["handle"],
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
        raise _bad_response(answer, repr(e)) from e


def models(answer: HttpAnswer) -> list[dict[str, Any]]:
    """Return the models in a reply to `GET /v1/models`. Raises the same errors as
    `embedding`."""
    check(answer)
    try:
        return list(msgspec.json.decode(answer.body)["models"])
    except (KeyError, ValueError, TypeError) as e:
        raise _bad_response(answer, repr(e)) from e


def check(answer: HttpAnswer) -> None:
    """Raise an exception unless the status is 200.

    Raises RetryLater (429, 503, or 500 and 504 with a Retry-After), RemoteFailure (500, 504),
    EncoderUnavailable("encoder_bad_response") if the body is invalid, or EncoderRefused (the service's reason
    and message).
    """
    if answer.status == 200:
        return
    try:
        error = msgspec.json.decode(answer.body)["error"]
        refusal = EncoderRefused(str(error["message"]), reason=str(error["reason"]))
        precise = error.get("retry_after_s")
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise _bad_response(answer, f"HTTP {answer.status}") from e
    pause_s = retry_after_s(precise)
    if pause_s is None:
        pause_s = retry_after_s(answer.headers.get("retry-after"))
    if answer.status in _BUSY or (answer.status in _FAILED and pause_s is not None):
        raise RetryLater(refusal, pause_s)
    if answer.status in _FAILED:
        raise RemoteFailure(refusal)
    raise refusal


def _bad_response(answer: HttpAnswer, why: str) -> EncoderUnavailable:
    return EncoderUnavailable(f"{answer.url} is not an encoder service: {why}", reason="encoder_bad_response")
