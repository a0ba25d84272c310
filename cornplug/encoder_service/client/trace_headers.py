"""Trace of the caller as HTTP headers, if opentelemetry-api is installed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable


def trace_headers() -> dict[str, str]:
    """Return headers of the current span: `traceparent` and those of the app's propagators. Empty without
    a span."""
    headers: dict[str, str] = {}
    inject = _inject()
    if inject is not None:
        inject(headers)
    return headers


@functools.cache
def _inject() -> Callable[[dict[str, str]], None] | None:
    # Asked for at the first request, and no import statement: an app without it pays nothing.
    try:
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    inject: Callable[[dict[str, str]], None] = propagate.inject
    return inject
