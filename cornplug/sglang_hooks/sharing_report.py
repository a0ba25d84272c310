"""Report for `cornplug doctor --model`: whether SGLang would share a checkpoint. The report does not load it.

This module calls the same functions as a server that resolves its settings. A server also checks the memory
pools of the loaded model (`late_exclusions.py`), which this report cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cornplug import config as settings
from cornplug.errors import CheckpointError, ConfigError, LayoutError
from cornplug.sglang_hooks.kv import exclusions
from cornplug.sglang_hooks.media.media_digests import own_tower
from cornplug.sglang_hooks.model.model_config import describe as engine_model
from cornplug.sglang_hooks.model.model_config import runs_generic_backend
from cornplug.sharing_verdict import NO_TOWER, SharingVerdict, rejected_verdicts, verdict_of_checks


def describe(model: str, flags: Sequence[str] = ()) -> list[SharingVerdict]:
    """Return whether a server with this checkpoint and these flags would share KV and embeddings.

    Reads the weights once. Call this in a separate process, because it exits if SGLang's parser rejects a
    flag.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(["--model-path", model, *flags])
        server_args.resolve_once()
    except (ValueError, OSError, NotImplementedError, RuntimeError, AssertionError, ConfigError) as e:
        return rejected_verdicts("SGLang", e)
    resolved, running = resolved_view(server_args), model_config_of(server_args)
    kv = verdict_of_checks(
        "KV",
        lambda: _check_kv(server_args),
        lambda: engine_model(resolved, running).kv_identity(),
    )
    if not running.is_multimodal:
        return [kv, SharingVerdict(what="embeddings", shared=False, why=NO_TOWER)]
    return [kv, verdict_of_checks("embeddings", lambda: _check_embeddings(resolved, running))]


def _check_embeddings(resolved: Any, running: Any) -> None:
    """Raise CheckpointError if the server would not share embeddings."""
    model = engine_model(resolved, running)
    own = own_tower(model, resolved, generic=runs_generic_backend(running))
    try:
        model.tower_identity()
    except CheckpointError:
        if own is None:
            raise


def _check_kv(server_args: Any) -> None:
    """Raise LayoutError with the reason if the server would not share KV."""
    engine = settings.load().engine
    if not engine.share_kv:
        raise LayoutError("engine.share_kv is false", reason="disabled")
    if why := exclusions.exclusion_reason(server_args, engine.page_tokens):
        raise LayoutError(why)
