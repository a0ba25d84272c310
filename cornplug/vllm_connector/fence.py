"""Catches all errors in hooks: after an error, the engine continues without sharing.

vLLM does not catch exceptions of these calls, so an exception in its engine core or in a worker would end the
engine. Expected errors are counted as misses where they occur. This module handles all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast


class Fenced(Protocol):
    """Connector whose sharing can be stopped."""

    def _stop_sharing(self, hook: str, error: Exception) -> None: ...


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def fenced(answer: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Return a decorator of hooks. After an error it stops sharing, and the hook returns `answer(self,
    ...)`.
    """

    def decorate(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def guarded(self: Fenced, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as e:  # noqa: BLE001 - any error
                self._stop_sharing(hook.__name__, e)
                return answer(self, *args, **kwargs)

        return cast(_Hook, guarded)

    return decorate


def called_again(hook: _Hook) -> _Hook:
    """Decorate a hook: after an error, stop sharing and call the hook once more."""
    return fenced(hook)(hook)
