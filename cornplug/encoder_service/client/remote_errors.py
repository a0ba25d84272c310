"""Errors of services on other hosts, from answers that no seal vouches for and from failed connections."""

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
    """The error for a service that could not be reached, or ended the connection."""
    return EncoderUnavailable(
        f"no service answers at {url} ({str(why) or type(why).__name__}); start one there with: cornplug "
        "encoder --model ... --host ADDRESS",
        reason="encoder_down",
    )


def refusal_of(url: str, answer: HttpAnswer) -> EncoderError:
    """The error of an unsealed answer. Whoever forges one makes the engine encode, and no more."""
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
                f"{text}; it takes no engines over HTTP: give it this release and cornplug[remote]",
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
    """The same error for one caller: an exception that is raised twice collects tracebacks."""
    if isinstance(error, EncoderRefused):
        return EncoderRefused(str(error), reason=error.reason, retry_after_s=error.retry_after_s)
    return EncoderUnavailable(str(error), reason="encoder_down" if error is None else error.reason)
