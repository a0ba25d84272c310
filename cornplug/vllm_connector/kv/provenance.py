"""Whose KV a request's tokens have, where another connector loads some too (vLLM's MultiConnector).

What NIXL, LMCache or an offloading connector brought was named by somebody else, so nobody here can say
what it was computed from. Neither what lies behind it: KV follows from all the KV before. So a page is
saved only where this engine computed everything up to its end, or had it from us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_here: Final = threading.local()


@dataclass(slots=True)
class OwnTokens:
    """The tokens of one request, from its first, whose KV was computed here or loaded by us."""

    end: int = 0

    def extend(self, start: int, end: int) -> int:
        """Tokens `start` to `end` are ours as well, if all before them are. Returns where ours end, at
        most `end`.

        What the engine's own prefix cache gave is not ours: others' loads are in it.
        """
        if start <= self.end:
            self.end = max(self.end, end)
        return min(self.end, end)


def others_load() -> bool:
    """Whether the connector that is being made stands beside others."""
    return getattr(_here, "beside", False)


def _make_several(original: Callable[..., Any], multi: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    connectors = config.kv_transfer_config.kv_connector_extra_config.get("connectors") or ()
    _here.beside = len(connectors) > 1
    try:
        return original(multi, config, *args, **kwargs)
    finally:
        _here.beside = False


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
        "MultiConnector.__init__",
        _make_several,
    ),
)
