"""Tells computed KV from KV that another connector loaded, beside which ours runs (vLLM's MultiConnector).

KV from NIXL, LMCache or an offloading connector comes without page keys: the weights and tokens behind it
are unknown, and so are those of all KV after it, which follows from all the KV before. A page is saved
only where this engine computed every token up to its end, or loaded it through this connector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_here: Final = threading.local()


@dataclass(slots=True)
class OwnTokens:
    """The leading tokens of one request whose KV this engine computed or this connector loaded."""

    end: int = 0

    def extend(self, start: int, end: int) -> int:
        """Add tokens `start` to `end`, if all before them are known. Returns the end of the known tokens,
        at most `end`.

        Tokens from the engine's own prefix cache do not count: other connectors' loads are in it.
        """
        if start <= self.end:
            self.end = max(self.end, end)
        return min(self.end, end)


def others_load() -> bool:
    """Whether vLLM is making the connector beside others."""
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
