"""The last fence: an error of any kind in a hook ends sharing, and never the engine.

vLLM guards none of these calls: an exception in its engine core or in a worker ends the engine. Errors that
can be expected are counted misses where they occur; this is for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast


class Fenced(Protocol):
    """A connector whose sharing can be stopped."""

    def _stop_sharing(self, hook: str, error: Exception) -> None: ...


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def fenced(answer: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Return a decorator: after an error, sharing is stopped and the hook's result is `answer(self, ...)`."""

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
    """Decorator that stops sharing after an error and calls the hook once more."""
    return fenced(hook)(hook)
