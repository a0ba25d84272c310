"""Page keys of long prompts, made as their requests come in.

vLLM hashes a request's blocks there too: in the thread that receives requests, beside the steps of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.page_keys import PageKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ATTRIBUTE: Final = "cornplug_page_keys"
_LONG_TOKENS: Final = 4096
"""A shorter prompt's keys take less than a tenth of a step; they are made when they are asked for."""


class KeyMaker(Protocol):
    """What makes the keys of requests: an engine core's tracker."""

    def keys_of(self, request: Request) -> PageKeys | None:
        """The request's keys, as long as nothing excludes it. Any thread may ask."""


_maker: ref[KeyMaker] | None = None


def make_by(maker: KeyMaker) -> None:
    """Make the keys of requests that come in by this tracker, as long as it lives."""
    global _maker
    _maker = ref(maker)


def received(request: Request) -> None:
    """A request has come in."""
    maker = _maker() if _maker is not None else None
    if maker is None or request.num_tokens < _LONG_TOKENS:
        return
    try:
        keys = maker.keys_of(request)
        if keys is not None:
            keys.upto(request.all_token_ids, request.num_tokens)
            setattr(request, _ATTRIBUTE, keys)
    except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
        # An error here would end the thread, and the engine: the lookup meets it again, and counts it.
        compat.logger.debug("cornplug: cannot compute keys in advance: %r", e)


def made_for(request: Request) -> PageKeys | None:
    """The keys that were made when the request came in; None if none were."""
    return getattr(request, _ATTRIBUTE, None)


def _from_engine_core_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = original(*args, **kwargs)
    received(request)
    return request


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.request", "Request.from_engine_core_request", _from_engine_core_request),
)
