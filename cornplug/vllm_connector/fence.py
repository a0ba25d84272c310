"""Error handling for connector hooks. After an unexpected error in a hook, the engine continues without
sharing.

vLLM does not catch exceptions from connector hooks, so an exception in its engine core or in a worker would
end the engine. Expected errors are counted as misses where they occur. This module handles all other errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast


class Fenced(Protocol):
    """Connector whose hooks `fenced` can guard, because it can stop sharing after an error."""

    def _stop_sharing(self, hook: str, error: Exception) -> None: ...


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def fenced(answer: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Return a decorator for connector hooks. If a decorated hook raises, sharing stops and the hook returns
    `answer(self, ...)` instead."""

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
    """Decorate a connector hook so that if it raises, sharing stops and the hook is called again, now without
    sharing."""
    return fenced(hook)(hook)
