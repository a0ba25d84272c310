"""What vLLM's config says about the model that it runs, as identities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service.wire_tensors import dtype_name
from cornplug.engine_side.model import EngineModel, TowerIdentity, declares_quantization
from cornplug.errors import CheckpointError
from cornplug.vllm_connector.compat import PROVEN

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Weights that these formats load are not the checkpoint's safetensors.
_UNVERIFIABLE_FORMATS = frozenset(
    {"dummy", "pt", "npcache", "gguf", "tensorizer", "runai_streamer_sharded", "sharded_state"}
)


def engine_model(config: VllmConfig, *, processor_kwargs: dict[str, Any] | None = None) -> EngineModel:
    """This engine's model. Raises CheckpointError where nobody can say what runs."""
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if load_format in _UNVERIFIABLE_FORMATS:
        raise CheckpointError(
            f"load format {load_format!r} does not read safetensors; weights cannot be identified",
            reason="load_format",
        )
    model = config.model_config
    return EngineModel(
        checkpoint=Checkpoint.open(model.model, model.revision),
        dtype=dtype_name(model.dtype),
        max_model_len=model.max_model_len,
        processor_kwargs=processor_kwargs or {},
        engine="vllm",
        proven=PROVEN,
        overrides=_overrides(config),
    )


def tower_identity(config: VllmConfig) -> TowerIdentity:
    """Identity of this engine's tower and projector under its dtype and processor settings.

    Reads weights (cached on disk). Raises CheckpointError.
    """
    mm_config = config.model_config.get_multimodal_config()
    return engine_model(config, processor_kwargs=dict(mm_config.mm_processor_kwargs or {})).tower_identity()


def kv_identity(config: VllmConfig) -> tuple[bytes, dict[str, Any]]:
    """(language model fingerprint, KV spec without the page geometry). Reads weights once.

    Raises CheckpointError.
    """
    return engine_model(config).kv_identity()


def embedding_width(config: VllmConfig) -> int:
    """Columns of an embedding in vLLM's encoder cache.

    Those of the LLM; where the tower hands on inner layers too (deepstack), all side by side.
    """
    model = config.model_config
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_hidden_size()) * (1 + len(levels))


def _overrides(config: VllmConfig) -> dict[str, Any]:
    """Settings of the command line that change values and that the checkpoint does not know."""
    model = config.model_config
    found: dict[str, Any] = {}
    if callable(model.hf_overrides):
        raise CheckpointError(
            "hf_overrides is a function; its effect cannot be identified", reason="overrides"
        )
    if model.hf_overrides:
        found["hf_overrides"] = model.hf_overrides
    if model.quantization and not declares_quantization(model.hf_config):
        found["quantization"] = str(model.quantization)
    if str(model.model_impl) == "transformers":
        # Other code than the classes that were compared with the encoder service.
        found["model_impl"] = "transformers"
    media = model.multimodal_config
    if getattr(media, "video_pruning_rate", None):
        # vLLM then leaves rows out of videos, and writes positions into further columns of pictures.
        found["video_pruning"] = [media.video_pruning_method, media.video_pruning_rate]
    return found
