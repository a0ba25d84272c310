"""Ultravox: a Whisper tower for any LLM, then a projector that stacks eight frames into a row.

A frozen tower is not in the checkpoint. `audio_model_id` is the id of the Whisper checkpoint that contains
the tower, and all Ultravox models with this Whisper share its features. Remote code from the hub is never
run. This module and `towers/ultravox.py` follow vLLM's model of the same name.
"""

from __future__ import annotations

from typing import Final

from cornplug.checkpoints.families.family import BaseCheckpoint, Json, ModelFamily, Spec
from cornplug.checkpoints.families.qwen2_audio import mel_spec, whisper_spec
from cornplug.errors import CheckpointError

_PROJECTOR_DEFAULTS: Final[Json] = {
    "hidden_size": 4096,
    "stack_factor": 8,
    "projector_act": "swiglu",
    "projector_ln_mid": False,
    "num_projector_layers": 0,
}
"""Default values of UltravoxConfig (vllm/transformers_utils/configs/ultravox.py, 0.32)."""


def _tower(config: Json) -> Spec:
    audio = config.get("audio_config") or {}
    if audio.get("model_type", "whisper") != "whisper":
        raise CheckpointError(
            f"Ultravox with a {audio['model_type']!r} tower is not supported; use whisper.",
            reason="unknown_family",
        )
    return whisper_spec(audio)


def _projector(config: Json) -> Spec:
    given = {name: config[name] for name in _PROJECTOR_DEFAULTS if config.get(name) is not None}
    spec = {**_PROJECTOR_DEFAULTS, **given, "d_model": _tower(config)["d_model"]}
    if spec.pop("num_projector_layers"):
        raise CheckpointError(
            "Ultravox with a transformer projector (num_projector_layers) is not supported.",
            reason="unknown_family",
        )
    return spec


def _preprocess(preprocessor: Json) -> Spec:
    # Regardless of its JSON, Ultravox's own processor splits audio into chunks of 30 s, and does not pad
    # shorter audio to 30 s.
    return mel_spec(preprocessor) | {"padding": "longest", "chunked": True}


FAMILY: Final = ModelFamily(
    name="ultravox",
    tower_class="ultravox:Ultravox",
    inputs={"audio": ("audio_features", "audio_lens")},
    tower_prefixes=("audio_tower.",),
    projector_prefixes=("multi_modal_projector.",),
    language_model_prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    shares_features=True,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=_preprocess,
    before_cut=lambda _config, _name: True,
    base=BaseCheckpoint(
        part="tower",
        name=lambda config: config.get("audio_model_id"),
        prefixes=("model.encoder.", "encoder."),
        config_field="audio_config",
    ),
)
