"""Identities of the model that vLLM runs, computed from its VllmConfig."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common import engine_config, engine_state
from cornplug.engine_common.model_identity import EngineModel, InitialModel, TowerIdentity
from cornplug.errors import CheckpointError
from cornplug.vllm_connector.compat import EPOCHS, validated_families
from cornplug.vllm_connector.model import setting_verdicts
from cornplug.vllm_connector.model.setting_verdicts import judge_common, judge_embeddings, judge_kv

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


# Fields that vLLM adds for quantised attention kernels (model_loader/weight_utils.py). They repeat numbers of
# heads that the config also has elsewhere.
_KERNEL_FIELDS: Final = ("quantization_config.total_num_heads", "quantization_config.total_num_kv_heads")

_initial_llm: Final = InitialModel()
_initial_tower: Final = InitialModel()
"""Model with which this process started, described once for KV (`_initial_llm`) and once for embeddings
(`_initial_tower`)."""


def tower_identity(config: VllmConfig) -> TowerIdentity:
    """Return the identity of this engine's tower and projector, with the engine's dtype and processor
    settings.

    Reads weights (cached on disk). Raises CheckpointError if the tower cannot be identified.
    """

    def describe() -> EngineModel:
        overrides = (judge_common(config) | judge_embeddings(config)).overrides_or_raise()
        return replace(
            _engine_model(config, overrides, processor_kwargs=processor_arguments(config)),
            video_settings=_video_settings(config),
            why_no_videos=why_no_videos(config),
        )

    return _check_weight_files(_initial_tower.current(describe)).tower_identity()


def processor_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return the deployment's processor arguments that change the processor's outputs."""
    given = dict(config.model_config.get_multimodal_config().mm_processor_kwargs or {})
    # The processor runs on the CPU in any case, so this argument changes nothing.
    return {name: value for name, value in given.items() if (name, value) != ("device", "cpu")}


def why_no_videos(config: VllmConfig) -> str:
    """Return the reason why this model's videos are not shared, or "" if they are shared."""
    model = config.model_config
    compared = validated_families(dtype_name(model.dtype), "video")
    if getattr(model.hf_config, "model_type", None) not in compared:
        return "unproven_family"
    # Rows contain positions after pruning, and the prompt does not show which rows were kept.
    mm_config = model.get_multimodal_config()
    return "video_pruning" if getattr(mm_config, "video_pruning_rate", None) else ""


def _video_settings(config: VllmConfig) -> dict[str, Any]:
    """Return the settings that determine Qwen-VL's positions for a video, in addition to the video's
    metadata: `tokens_per_second` from the model's config, and the release of transformers. The release's
    processors compute `second_per_grid_ts` and sample frames."""
    vision = getattr(config.model_config.hf_config, "vision_config", None)
    return {
        "tokens_per_second": getattr(vision, "tokens_per_second", None),
        "transformers": importlib.metadata.version("transformers"),
    }


def kv_identity(config: VllmConfig) -> tuple[bytes, dict[str, Any]]:
    """Return (language model fingerprint, KV spec without the page geometry). Reads the weights.

    Raises CheckpointError if the model's KV cannot be identified.
    """

    def describe() -> EngineModel:
        overrides = (judge_common(config) | judge_kv(config)).overrides_or_raise()
        return _engine_model(config, overrides)

    fingerprint, spec = _check_weight_files(_initial_llm.current(describe)).kv_identity()
    draft = _draft_identity(config)
    return fingerprint, spec if draft is None else {**spec, "draft": draft}


def draft_config_with_kv(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculative decoding config if the draft model has its own KV (EAGLE, MTP, a separate draft
    model), else None."""
    speculative = getattr(config, "speculative_config", None)
    return speculative if speculative is not None and speculative.uses_draft_kv_cache() else None


def _draft_identity(config: VllmConfig) -> dict[str, Any] | None:
    """Return everything that determines a draft model's KV, which pages also contain. Return None if there is
    no draft model with KV.

    A draft's KV affects how many proposed tokens are accepted, but never which tokens are sampled. Therefore
    the draft's settings are not checked like the model's settings. Reads the draft's weights. Raises
    CheckpointError if the draft cannot be identified.
    """
    speculative = draft_config_with_kv(config)
    if speculative is None:
        return None
    draft = speculative.draft_model_config
    folder = getattr(config.load_config, "download_dir", None)
    checkpoint = Checkpoint.open(draft.model, draft.revision, cache_dir=folder)
    return {
        "method": str(speculative.method),
        "weights": checkpoint.fingerprint("language_model").hex(),
        "config": checkpoint.kv_spec(),
        "dtype": dtype_name(draft.dtype),
        "quantization": str(draft.quantization),
    }


def require_same_tensors(path: str, began_ns: int) -> None:
    """Raise CheckpointError unless the folder `path` contains exactly the tensors of the model with which
    this engine core started. The engine's weights were loaded from this folder."""
    described = [started for started in (_initial_llm, _initial_tower) if started.is_known]
    if not described:
        raise CheckpointError(
            "cornplug has not identified the model with which this process started", reason="weights_updated"
        )
    for started in described:
        _check_weight_files(started.with_weights(path, began_ns))


def _check_weight_files(model: EngineModel) -> EngineModel:
    """Return `model` unchanged. Raises CheckpointError if vLLM reads other weight files from the model's
    folder than cornplug does."""
    path = model.checkpoint.path
    if any(file.name.startswith("consolidated") for file in path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} has consolidated*.safetensors, which vLLM reads instead of the other files; remove "
            "them to share",
            reason="load_format",
        )
    return model


def embedding_width(config: VllmConfig) -> int:
    """Return the number of columns of an embedding in vLLM's encoder cache.

    This is the language model's width, multiplied by 1 plus the number of inner layers that the tower also
    returns (deepstack).
    """
    model = config.model_config
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_hidden_size()) * (1 + len(levels))


def _engine_model(
    config: VllmConfig, overrides: dict[str, Any], *, processor_kwargs: dict[str, Any] | None = None
) -> EngineModel:
    """Return the description of this engine's model, from which its identities are computed. Raises
    CheckpointError if the model cannot be identified."""
    model = config.model_config
    checkpoint = Checkpoint.open(
        model.model, model.revision, cache_dir=getattr(config.load_config, "download_dir", None)
    )
    trusts = bool(getattr(model, "trust_remote_code", False))
    if other := setting_verdicts.transformers_backend(model):
        # vLLM then runs other code than the classes whose embeddings were compared with the encoder service.
        overrides = {"ModelConfig.model_impl": other, **overrides}
    if trusts and (code := engine_config.remote_code_digest(checkpoint.path)):
        overrides = {**overrides, "remote_code": code}
    changed = engine_config.config_changes(*_read_configs(model, checkpoint, trusts))
    changed = {path: value for path, value in changed.items() if not path.endswith(_KERNEL_FIELDS)}
    return EngineModel(
        checkpoint=checkpoint,
        dtype=dtype_name(model.dtype),
        max_model_len=model.max_model_len,
        processor_kwargs=processor_kwargs or {},
        engine="vllm",
        validated_families=validated_families(dtype_name(model.dtype)),
        began_ns=engine_state.current().start_ns(),
        epochs=EPOCHS,
        overrides=overrides,
        config_changes=changed,
        length_settings=_length_settings(model),
    )


def _read_configs(model: Any, checkpoint: Checkpoint, trusts: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config that vLLM runs, config that transformers reads from the same files).

    vLLM renames an MLA model's rotary embedding in the config of the process that has loaded the model
    (models/deepseek_v2.py). The result has the published name, as in other processes.
    """
    from transformers import AutoConfig

    running = model.hf_config.to_dict()
    try:
        read = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trusts, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        # If transformers has no class for this model, count every value in vLLM's own config as a difference.
        return running, {}
    published = read.to_dict()
    for ours, theirs in ((running, published), (_text_config(running), _text_config(published))):
        rope = ours.get("rope_parameters") or {}
        name = (theirs.get("rope_parameters") or {}).get("rope_type")
        if (name, rope.get("rope_type")) == ("yarn", "deepseek_yarn"):
            rope["rope_type"] = name
    return running, published


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or {}


def _length_settings(model: Any) -> dict[str, Any]:
    """Return the additional settings that determine KV in models that depend on the maximum sequence length
    (Llama 4)."""
    return {
        "generation_config": str(getattr(model, "generation_config", "auto")),
        "override": dict(getattr(model, "override_generation_config", None) or {}),
    }
