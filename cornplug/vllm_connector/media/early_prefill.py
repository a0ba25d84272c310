"""Early prefill of the tokens before a request's first media item whose embedding is in flight.

    ECScheduler.can_schedule  True if the tokens before that item are worth a step
    EncoderCacheManager       `can_allocate` is False for an item in flight, so vLLM ends the chunk before it

vLLM's scheduler (`_try_schedule_encoder_inputs` in 0.32 and 0.33) ends a prefill chunk before a media item
for which its encoder cache has no space, and never inside an item. Therefore early prefill is also correct
for models with bidirectional attention within images. With only a connector's `ensure_cache_available`, vLLM
would defer the complete request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_MIN_CHUNK_TOKENS: Final = 128
"""Minimum number of tokens of an early prefill chunk. A step for fewer tokens costs more than it gains."""
_MAX_KV_FRACTION: Final = 0.1
"""Maximum fraction of the KV cache for requests that wait for media. A larger fraction would cause
preemptions."""
_MAX_SEQS_FRACTION: Final = 0.25
"""Maximum number of requests that are prefilled early, as a fraction of `--max-num-seqs`."""


class EarlyPrefill:
    """Selects the requests that vLLM prefills up to their first media item in flight. Selects no request
    before `enable` is called."""

    def __init__(self, *, max_tokens: int = 0, max_requests: int = 0) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._enabled = False
        self._early_tokens: dict[str, int] = {}
        """Number of tokens before the first media item in flight, by request id."""
        self._is_in_flight: Callable[[str], bool] = lambda identifier: False
        self._on_begin: Callable[[], None] = lambda: None

    def enable(self) -> None:
        """Enable early prefill. Called when vLLM's scheduler creates cornplug's encoder cache manager."""
        self._enabled = True

    def set_callbacks(self, is_in_flight: Callable[[str], bool], on_begin: Callable[[], None]) -> None:
        """Set two callbacks. `is_in_flight` returns whether the embedding with an identifier is in flight.
        `on_begin` is called once for each media item up to which a request is prefilled early."""
        self._is_in_flight, self._on_begin = is_in_flight, on_begin

    def is_held_back(self, identifier: str) -> bool:
        """Return whether a prefill chunk must end before the media item with this identifier."""
        return self._enabled and self._is_in_flight(identifier)

    def try_admit(self, request: Request, computed: int, end: int) -> bool:
        """Return whether vLLM may prefill now from token `computed` to the media item in flight at `end`.

        A preempted request waits, because other requests needed its blocks.
        """
        if not self._enabled or end - computed < _MIN_CHUNK_TOKENS or request.num_preemptions:
            return False
        others = self._early_tokens.keys() - {request.request_id}
        if len(others) >= self._max_requests:
            return False
        if sum(self._early_tokens[other] for other in others) + end > self._max_tokens:
            return False
        if self._early_tokens.get(request.request_id) != end:
            self._early_tokens[request.request_id] = end
            self._on_begin()
        return True

    def forget(self, request_id: str) -> None:
        """Remove a request that no longer waits for a media item."""
        self._early_tokens.pop(request_id, None)


class InFlightEncoderCacheManager(EncoderCacheManager):
    """vLLM's encoder cache manager, which reports no space for a media item whose embedding is in flight."""

    _early: EarlyPrefill | None = None

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> InFlightEncoderCacheManager:
        manager = cls(cache_size=cache_size)
        manager._early = _early_by_config.pop(id(vllm_config), None)
        if manager._early is not None:
            manager._early.enable()
        return manager

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        if self._early is not None and self._early.is_held_back(request.mm_features[input_id].identifier):
            return False
        return super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)


_MANAGER: Final = f"{InFlightEncoderCacheManager.__module__}.{InFlightEncoderCacheManager.__qualname__}"
_early_by_config: Final[weakref.WeakValueDictionary[int, EarlyPrefill]] = weakref.WeakValueDictionary()
"""EarlyPrefill objects by the `id()` of their VllmConfig. vLLM's scheduler first creates its connector, and
then its encoder cache manager with the same configuration."""


def create_early_prefill(config: VllmConfig) -> EarlyPrefill:
    """Create the EarlyPrefill for the scheduler that is being created. It selects no request if
    `unsupported_reason` returns a reason."""
    if unsupported_reason(config):
        return EarlyPrefill()
    cache, seqs = config.cache_config, config.scheduler_config.max_num_seqs
    early = EarlyPrefill(
        max_tokens=int((cache.num_gpu_blocks or 0) * cache.block_size * _MAX_KV_FRACTION),
        max_requests=int(seqs * _MAX_SEQS_FRACTION),
    )
    _early_by_config[id(config)] = early
    config.ec_manager_config.encoder_cache_manager_cls = _MANAGER
    return early


def unsupported_reason(config: Any) -> str:
    """Return the reason why vLLM does not prefill requests while their media are encoded, or "" if it
    does."""
    model = config.model_config
    if config.ec_manager_config.encoder_cache_manager_cls not in (None, _MANAGER):
        return "--ec-manager-config sets an encoder cache manager"
    if model.is_encoder_decoder:
        return "encoder-decoder models have a single media item, at the first token"
    if not config.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    if config.num_prefill_lookahead_tokens:
        return "the draft model reads tokens after the chunk"
    if config.cache_config.mamba_cache_mode == "align":
        return "chunks end where vLLM caches states"
    media = model.multimodal_config
    if media.mm_encoder_only or media.is_multimodal_pruning_enabled():
        return "the engine has no text prefill, or it prunes videos"
    return ""
