"""Tracking of which KV this engine computed itself, and which KV another connector loaded (with vLLM's
MultiConnector).

KV from NIXL, LMCache or an offloading connector has no page keys, because it is not known for which weights
and tokens it was computed. KV computed after it depends on it and has no page keys either. A page is saved
only if this engine computed every token up to the page's end, or loaded it through cornplug.

The connectors of a prefill server do not load KV. Until another connector loads for the first time, the
engine's own prefix cache contains only this engine's KV.

The engine's own prefix cache identifies blocks by hashes. If hashes may collide (`--prefix-caching-hash-algo
xxhash`), a request may get another prompt's blocks. In that case, pages that a request got from this cache
are not saved either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cornplug.vllm_connector.compat import KV_CONNECTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_here: Final = threading.local()

_COLLISION_RESISTANT: Final = frozenset({"sha256", "sha256_cbor"})
"""Values of --prefix-caching-hash-algo whose hashes do not collide in practice."""

_LOADS_ARE_SEEN: Final = frozenset({"LMCacheMPConnector", "NixlConnector", "OffloadingConnector"})
"""Names of connectors that load KV only for requests that `MultiConnector.update_state_after_alloc` assigns
to them."""


class OtherLoads:
    """Records whether the engine's own prefix cache may contain KV that another connector loaded."""

    def __init__(self) -> None:
        self.possible = not getattr(_here, "loads_are_seen", False)

    def seen(self) -> None:
        """Record that another connector will load KV."""
        self.possible = True


@dataclass(slots=True)
class OwnTokens:
    """Counts the leading tokens of a request whose KV this engine computed, or loaded through cornplug."""

    end: int = 0

    def admitted(self, known: int) -> None:
        """Record that vLLM has assigned new blocks to the request, in which the KV of the first `known`
        tokens comes from this engine or cornplug."""
        self.end = known

    def extend(self, start: int, end: int) -> int:
        """Record that this engine computed tokens `start` to `end`, or loaded them through cornplug. These
        tokens count only if all tokens before `start` count. Returns the number of leading tokens that count,
        at most `end`.

        Tokens from the engine's own prefix cache do not count once that cache contains KV from other
        connectors.
        """
        if start <= self.end:
            self.end = max(self.end, end)
        return min(self.end, end)


def own_cache_is_exact(config: VllmConfig) -> bool:
    """Return whether the engine's own prefix cache returns only blocks that were computed for a request's own
    tokens, because its hashes do not collide."""
    return config.cache_config.prefix_caching_hash_algo in _COLLISION_RESISTANT


def others_load() -> bool:
    """Return whether vLLM is currently creating cornplug's connector together with other connectors."""
    return getattr(_here, "beside", False)


def _make_several(original: Callable[..., Any], multi: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    names = [
        child.get("kv_connector")
        for child in config.kv_transfer_config.kv_connector_extra_config.get("connectors") or ()
    ]
    _here.beside = len(names) > 1
    _here.loads_are_seen = _LOADS_ARE_SEEN.issuperset(set(names) - {KV_CONNECTOR})
    try:
        return original(multi, config, *args, **kwargs)
    finally:
        _here.beside = _here.loads_are_seen = False


def _load_by_one(
    original: Callable[..., Any], multi: Any, request: Any, blocks: Any, num_external_tokens: int
) -> Any:
    if num_external_tokens:
        chosen = multi._requests_to_connector.get(request.request_id)
        for i, connector in enumerate(multi.sub_connectors):
            if i != chosen and hasattr(connector, "_another_connector_loads"):
                connector._another_connector_loads()
    return original(multi, request, blocks, num_external_tokens)


_HOME: Final = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (_HOME, "MultiConnector.__init__", _make_several),
    (_HOME, "MultiConnector.update_state_after_alloc", _load_by_one),
)
