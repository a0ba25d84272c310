"""Access to the service: the check against accidental exposure, the salts of cache keys, and the audit log.

The logger "cornplug.audit" gets one JSON line for each reload and each refused request. After a burst of 100
refusals, at most 10 refusals per second are logged. The next line contains the number of omitted refusals.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import HTTPConnection

from cornplug.config import EncoderConfig, QosConfig
from cornplug.encoder_service.client.endpoints import is_loopback
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import QosCaller

AUDITED_REASONS: Final = frozenset(
    {
        "unauthorized", "forbidden", "forbidden_host", "forbidden_origin", "forbidden_salt",
        "forbidden_receiver",
    }
)  # fmt: skip
"""Refusal reasons that are logged. They depend on the caller's permissions, not on the format of a
request."""
_BURST: Final = 100
_REFILL_PER_S: Final = 10.0
_MAX_SHOWN_CHARS: Final = 200

log = logging.getLogger("cornplug.audit")


class AuditLog:
    """Writes one service's audit log. Not thread-safe, so use it from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = float(_BURST)
        self._refilled_at = clock()
        self._omitted = 0

    def log_refusal(self, request: HTTPConnection, reason: str) -> None:
        """Log one refusal, unless its reason is not in `AUDITED_REASONS` or the rate limit is reached."""
        if reason not in AUDITED_REASONS:
            return
        now = self._clock()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled_at) * _REFILL_PER_S)
        self._refilled_at = now
        if self._tokens < 1:
            self._omitted += 1
            return
        self._tokens -= 1
        extra = {"left_out": self._omitted} if self._omitted else {}
        self._omitted = 0
        log.warning("%s", _format_line("refused", _describe_caller(request), reason=reason, **extra))

    def log_operation(self, operation: str, request: HTTPConnection, **about: Any) -> None:
        """Log an operation that an operator's HTTP request triggered."""
        log.info("%s", _format_line(operation, _describe_caller(request), **about))

    def log_signal_operation(self, operation: str, **about: Any) -> None:
        """Log an operation that a signal to the service's process triggered."""
        log.info("%s", _format_line(operation, {"by": "signal"}, **about))


def _describe_caller(request: HTTPConnection) -> dict[str, Any]:
    return {
        "peer": request.client.host if request.client is not None else None,
        "method": request.scope.get("method"),
        "path": request.scope["path"][:_MAX_SHOWN_CHARS],
        "host": request.headers.get("host", "")[:_MAX_SHOWN_CHARS],
        "origin": request.headers.get("origin", "")[:_MAX_SHOWN_CHARS],
    }


def _format_line(event: str, caller: dict[str, Any], **about: Any) -> str:
    # JSON escapes line breaks and terminal control codes, so a caller's text cannot leave its field.
    return json.dumps({"event": event, **caller, **about})


def check_exposure(config: EncoderConfig, qos: QosConfig) -> None:
    """Raise ConfigError if the configuration would accidentally admit callers on other hosts without a
    key."""
    have_keys = any(one.keys_with_tenants() for one in qos.classes.values())
    if config.require_key and not (have_keys or config.admin_key.get_secret_value()):
        raise ConfigError(
            "encoder.require_key",
            "set, but no API keys are configured",
            "Set api_keys or tenants of a class in [qos.classes.NAME].",
        )
    if not (is_loopback(config.host) or config.require_key or config.allow_anonymous):
        raise ConfigError(
            "encoder.host",
            f"{config.host} can be reached from other hosts, and no key is required",
            "Set encoder.require_key (--require-key) and keys of classes. On a private network you can "
            "set encoder.allow_anonymous (--allow-anonymous) instead.",
        )


def effective_salt(caller: QosCaller, request_salt: str | None, config: EncoderConfig) -> str | None:
    """Return the salt for a request's cache keys: the caller's tenant, followed by the request's
    `cache_salt`.

    Args:
        request_salt: The request's `cache_salt`, or None if it has no salt.

    Raises EncoderRefused("forbidden_salt") if a caller without a tenant's key sends a `cache_salt` and
    `encoder.trust_salts` is not set.
    """
    if caller.tenant is not None:
        # Tenant names contain no slash, so a salt cannot be confused with another tenant.
        return caller.tenant if request_salt is None else f"{caller.tenant}/{request_salt}"
    if request_salt is not None and not config.trust_salts:
        raise EncoderRefused(
            "cache_salt: requires a tenant's key ([qos.classes.NAME] tenants); remove it, or set "
            "encoder.trust_salts behind a gateway that sets salts",
            reason="forbidden_salt",
        )
    return request_salt
