"""Errors of services on other hosts, from unsealed responses and failed connections."""

from __future__ import annotations

import contextlib

import msgspec

from cornplug.encoder_service.client.responses import HttpAnswer
from cornplug.errors import EncoderError, EncoderRefused, EncoderUnavailable


class _Detail(msgspec.Struct):
    message: str = ""
    retry_after_s: float | None = None


class _ErrorBody(msgspec.Struct):
    error: _Detail


def down(url: str, why: Exception) -> EncoderUnavailable:
    """Return the error for a service that could not be reached, or that closed the connection."""
    return EncoderUnavailable(
        f"no service responds at {url} ({str(why) or type(why).__name__}); start one there with: cornplug "
        "encoder --model ... --host ADDRESS",
        reason="encoder_down",
    )


def refusal_of(url: str, answer: HttpAnswer) -> EncoderError:
    """Return the error for an unsealed response. A forged one only makes the engine run its own tower."""
    said, retry_after_s = "", None
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        detail = msgspec.json.decode(answer.body, type=_ErrorBody).error
        said, retry_after_s = detail.message, detail.retry_after_s
    text = f"{url}: status {answer.status}" + (f": {said[:300]}" if said else "")
    match answer.status:
        case 401 | 403 | 421:
            return EncoderUnavailable(text, reason="encoder_untrusted")
        case 404 | 405 | 415:
            return EncoderUnavailable(
                f"{text}; the service does not accept engines over HTTP; install this release and "
                "cornplug[remote] there",
                reason="encoder_version",
            )
        case 413:
            return EncoderRefused(f"{text} (encoder.max_body_bytes)", reason="bad_input")
        case 429 | 503:
            return EncoderRefused(text, reason="overloaded", retry_after_s=retry_after_s)
        case 408 | 504:
            return EncoderUnavailable(text, reason="encoder_timeout")
        case 500 | 502:
            return EncoderRefused(text, reason="internal")
    return EncoderUnavailable(text, reason="encoder_bad_response")


def copy_of(error: EncoderError | None) -> EncoderError:
    """Return a copy of the error for one caller, because an exception that is raised twice collects
    tracebacks."""
    if isinstance(error, EncoderRefused):
        return EncoderRefused(str(error), reason=error.reason, retry_after_s=error.retry_after_s)
    return EncoderUnavailable(str(error), reason="encoder_down" if error is None else error.reason)
