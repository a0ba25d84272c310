"""What SGLang's settings say about the model that it runs, as identities."""

from __future__ import annotations

import json
from typing import Any, Final

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service.wire_tensors import dtype_name
from cornplug.engine_side.model import EngineModel, declares_quantization
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks.compat import PROVEN

UNVERIFIABLE_FORMATS: Final = frozenset(
    {
        "dummy",
        "expert_pack",
        "flash_rl",
        "gguf",
        "ipc_cache",
        "npcache",
        "presharded",
        "private",
        "pt",
        "remote",
        "remote_instance",
        "sharded_state",
    }
)
"""What these load formats read is not the checkpoint's safetensors."""

# Settings that change values and that neither the checkpoint nor vLLM knows. A server with one
# of them shares with its like only.
_PECULIAR: Final = ("modelopt_quant", "quantization_param_path", "rl_on_policy_target")
_PECULIAR_SWITCHES: Final = ("enable_precise_embedding_interpolation",)

# Settings that bring weights or computation from elsewhere: files that nobody has fingerprinted, a
# process that has loaded them, hooks on the model's modules.
_UNVERIFIABLE_SETTINGS: Final = (
    "custom_weight_loader",
    "decrypted_config_file",
    "forward_hooks",
    "kt_weight_path",
    "modelexpress_config",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
)


def engine_model() -> EngineModel:
    """The model of this process's engine, by the settings that SGLang has published here.

    Raises CheckpointError where nobody can say what runs: "load_format", "overrides", "no_settings"
    (SGLang has not published them yet), and as `Checkpoint.open`.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.runtime_context import get_server_args

    try:
        server_args = get_server_args()
    except ValueError as e:
        raise CheckpointError(f"SGLang has not said yet what it runs: {e}", reason="no_settings") from e
    return describe(resolved_view(server_args), model_config_of(server_args))


def describe(settings: Any, model: Any) -> EngineModel:
    """As `engine_model`, of SGLang's resolved settings and its ModelConfig."""
    if settings.load_format in UNVERIFIABLE_FORMATS:
        raise CheckpointError(
            f"load format {settings.load_format!r} does not read the checkpoint's safetensors; "
            "weights cannot be identified",
            reason="load_format",
        )
    elsewhere = [name for name in _UNVERIFIABLE_SETTINGS if getattr(settings, name)]
    elsewhere += ["weight_cache_mode"] if settings.weight_cache_mode == "client" else []
    elsewhere += ["a pointer head"] if model.pointer_head is not None else []
    if elsewhere:
        raise CheckpointError(
            f"what runs is not in the checkpoint alone ({', '.join(elsewhere)}); it cannot be identified",
            reason="load_format",
        )
    return EngineModel(
        checkpoint=Checkpoint.open(model.model_path, model.revision),
        dtype=dtype_name(model.dtype),
        max_model_len=model.context_len,
        processor_kwargs=dict((settings.mm_process_config or {}).get("image") or {}),
        engine="sglang",
        proven=PROVEN,
        overrides=_overrides(settings, model),
    )


def _overrides(settings: Any, model: Any) -> dict[str, Any]:
    """In the form of the vLLM room's, so that what both know as nothing is nothing."""
    found: dict[str, Any] = {}
    if overridden := json.loads(settings.json_model_override_args):
        found["hf_overrides"] = overridden
    if settings.quantization and not declares_quantization(model.hf_config):
        # Weights that an engine quantises as it loads them are its own: scales and rounding differ.
        found["sglang_quantization"] = str(settings.quantization)
    for field in _PECULIAR:
        if (value := getattr(settings, field)) is not None:
            found[field] = value
    return found | {field: True for field in _PECULIAR_SWITCHES if getattr(settings, field)}
