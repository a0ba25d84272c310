"""Computes page keys of long prompts when their requests arrive.

vLLM hashes a request's blocks at the same place: in the thread that receives requests, in parallel to steps
of other requests.
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
"""Minimum length. Keys of shorter prompts take less than a tenth of a step, and are computed when they are
needed."""


class KeyMaker(Protocol):
    """Computes keys of requests: the tracker of an engine core."""

    def keys_of(self, request: Request) -> PageKeys | None:
        """Return the request's keys, unless something excludes it. Thread-safe."""


_maker: ref[KeyMaker] | None = None


def make_by(maker: KeyMaker) -> None:
    """Use this tracker to compute the keys of arriving requests, while it exists."""
    global _maker
    _maker = ref(maker)


def received(request: Request) -> None:
    """Compute the keys of a request that has arrived."""
    maker = _maker() if _maker is not None else None
    if maker is None or request.num_tokens < _LONG_TOKENS:
        return
    try:
        keys = maker.keys_of(request)
        if keys is not None:
            keys.upto(request.all_token_ids, request.num_tokens)
            setattr(request, _ATTRIBUTE, keys)
    except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
        # An error here would end the thread and the engine. The lookup sees the same error later, and counts
        # it.
        compat.logger.debug("cornplug: cannot compute keys in advance: %r", e)


def made_for(request: Request) -> PageKeys | None:
    """Return the keys that were computed when the request arrived, or None."""
    return getattr(request, _ATTRIBUTE, None)


def _from_engine_core_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = original(*args, **kwargs)
    received(request)
    return request


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.request", "Request.from_engine_core_request", _from_engine_core_request),
)
