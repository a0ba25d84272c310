"""HTTP status of each refusal reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STATUS: Final[Mapping[str, int]] = {
    "unknown_model": 404,
    "bad_input": 422,
    "overloaded": 503,
    "over_share": 429,
    "too_late": 504,
    "internal": 500,
    "too_large": 413,
    "too_large_prepared": 413,
    "too_many_pixels": 413,
    "slow_body": 408,
    "media_type": 415,
    "not_found": 404,
    "method_not_allowed": 405,
    "draining": 503,
    "down": 503,
    "stuck": 503,
    "remote_url": 422,
    "remote_failed": 424,
    "remote_timeout": 424,
    "fetches_full": 503,
    "unauthorized": 401,
    "forbidden": 403,
    "forbidden_salt": 403,
    "forbidden_origin": 403,
    "forbidden_host": 421,
    "not_reloaded": 409,
    "forbidden_receiver": 403,
    "undeliverable": 502,
    "no_receiver": 504,
    "transfer": 501,
}

_OF_THE_MEDIUM: Final = frozenset({413, 415, 422, 424})
OF_THE_FETCH: Final = frozenset({"remote_failed", "remote_timeout", "fetches_full"})
"""Reasons after which another service, with another network route to the URL's host, may succeed."""

A_FAULT: Final = "internal error of the service; see its log"
"""Message for an internal error. It does not contain the exception's text, which may contain paths, addresses
and data of other clients."""


def status_of(reason: str) -> int:
    """Return the HTTP status of a refusal reason. Reasons without their own status concern the medium, and
    get status 422."""
    return _STATUS.get(reason, 422)


def is_of_medium(reason: str) -> bool:
    """Return whether a refusal is caused by the medium, so that neither another service nor a retry helps."""
    return status_of(reason) in _OF_THE_MEDIUM
