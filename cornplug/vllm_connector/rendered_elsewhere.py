"""Requests whose media were processed by another process: `vllm launch render` (used by llm-d), or a client.

Such a request sends processed inputs and a name for each media item to `/inference/v1/generate`. cornplug
cannot verify that a name belongs to the inputs, so these media have no key and are not shared
(`media/mm_identifiers.py`). A server that accepts such requests logs this at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.no_tower_settings import settings_in

NOT_SHARED: Final = (
    "requests with media from another process (/inference/v1/generate) share neither embeddings nor KV "
    "after the first medium. Text is shared. Send images to /v1/chat/completions to share them"
)


def are_taken(args: Any) -> bool:
    """Return whether a server with these command-line arguments accepts processed inputs over HTTP."""
    return bool(getattr(args, "enable_scale_out", False) or getattr(args, "tokens_only", False))


def _init_scale_out_state(
    original: Callable[..., Any], state: Any, args: Any, engine_client: Any, *rest: Any, **kwargs: Any
) -> Any:
    result = original(state, args, engine_client, *rest, **kwargs)
    config = engine_client.vllm_config
    if are_taken(args) and config.model_config.multimodal_config is not None and settings_in(config):
        compat.logger.warning("cornplug: %s.", NOT_SHARED)
    return result


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.entrypoints.scale_out.factories", "init_scale_out_state", _init_scale_out_state),
)
