"""Families with a Whisper tower: Qwen2-Audio and Ultravox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cornplug.checkpoints.model_family import BaseCheckpoint, Json, ModelFamily, Spec, without_inert
from cornplug.errors import CheckpointError

_WHISPER_DEFAULTS: Final[Json] = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "d_model": 384,
    "activation_function": "gelu",
    "max_source_positions": 1500,
    "scale_embedding": False,
}
"""Default values of transformers' WhisperConfig."""
_QWEN2_AUDIO_DEFAULTS: Final[Json] = {
    **_WHISPER_DEFAULTS,
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
}
_FIELD_ALIASES: Final[Mapping[str, str]] = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
}
_WHISPER_UNREAD: Final = frozenset(
    [
        "activation_dropout",
        "apply_spec_augment",
        "classifier_proj_size",
        "encoder_layerdrop",
        "forced_decoder_ids",
        "init_std",
        "is_encoder_decoder",
        "mask_feature_length",
        "mask_feature_min_masks",
        "mask_feature_prob",
        "mask_time_length",
        "mask_time_min_masks",
        "mask_time_prob",
        "max_target_positions",
        "median_filter_width",
        "model_type",
        "num_hidden_layers",
        "use_weighted_layer_sum",
        "vocab_size",
    ]
)
"""Fields for Whisper's decoder, training and timestamps. They do not affect the encoder's output."""
_EXTRACTOR_DEFAULTS: Final[Json] = {
    "kind": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "padding_side": "right",
    "dither": 0.0,
    "do_normalize": False,
}
# Fields that do not affect the spectrogram: derived fields, fields that the caller sets, names, and a filter
# bank in old files, which transformers does not read.
_NON_MEL_FIELDS: Final = frozenset(
    [
        "auto_map",
        "mel_filters",
        "n_samples",
        "nb_max_frames",
        "processor_class",
        "_processor_class",
        "return_attention_mask",
        "return_tensors",
    ]
)


def _whisper_spec(audio: Json, defaults: Json = _WHISPER_DEFAULTS) -> Spec:
    """Return the settings of a Whisper config that affect its encoder's output, except weights."""
    given = {k: v for k, v in without_inert(audio).items() if v is not None}
    for other, name in _FIELD_ALIASES.items():
        if other in given:
            given.setdefault(name, given.pop(other))
    found = {**defaults, **given}
    return {k: v for k, v in found.items() if k not in _WHISPER_UNREAD and not k.startswith("decoder_")}


def _mel_spec(preprocessor: Json) -> Spec:
    """Return every field of WhisperFeatureExtractor's JSON that changes the mel spectrogram."""
    given = {k: v for k, v in preprocessor.items() if v is not None and k not in _NON_MEL_FIELDS}
    kind = given.pop("feature_extractor_type", None)
    return {**_EXTRACTOR_DEFAULTS, **given, **({"kind": kind} if kind else {})}


# -- Qwen2-Audio: the encoder also halves the number of rows, then one linear layer ----------------


def _qwen2_audio_tower(config: Json) -> Spec:
    audio = config.get("audio_config") or {}
    if audio.get("model_type", "qwen2_audio_encoder") != "qwen2_audio_encoder":
        raise CheckpointError(
            f"Qwen2-Audio with a {audio['model_type']!r} tower is not supported; use qwen2_audio_encoder.",
            reason="unknown_family",
        )
    return _whisper_spec(audio, _QWEN2_AUDIO_DEFAULTS)


def _qwen2_audio_projector(config: Json) -> Spec:
    return {"d_model": _qwen2_audio_tower(config)["d_model"]}


QWEN2_AUDIO: Final = ModelFamily(
    name="qwen2_audio",
    tower_class="whisper:Qwen2Audio",
    inputs={"audio": ("input_features", "feature_attention_mask")},
    tower_prefixes=("audio_tower.", "model.audio_tower."),
    projector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
    language_model_prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    shares_features=False,
    tower_spec=_qwen2_audio_tower,
    projector_spec=_qwen2_audio_projector,
    preprocess_spec=_mel_spec,
    before_cut=lambda _config, _name: True,
)


# -- Ultravox: a Whisper tower for any LLM, then a projector that stacks eight frames into a row ----
#
# A frozen tower is not in the checkpoint. `audio_model_id` is the id of the Whisper checkpoint that contains
# the tower. All Ultravox models with the same Whisper checkpoint share the tower's output. Remote code from
# the hub is never run. This description and `towers/whisper.py` follow vLLM's Ultravox model.

_PROJECTOR_DEFAULTS: Final[Json] = {
    "hidden_size": 4096,
    "stack_factor": 8,
    "projector_act": "swiglu",
    "projector_ln_mid": False,
    "num_projector_layers": 0,
}
"""Default values of UltravoxConfig (vllm/transformers_utils/configs/ultravox.py, 0.32)."""


def _ultravox_tower(config: Json) -> Spec:
    audio = config.get("audio_config") or {}
    if audio.get("model_type", "whisper") != "whisper":
        raise CheckpointError(
            f"Ultravox with a {audio['model_type']!r} tower is not supported; use whisper.",
            reason="unknown_family",
        )
    return _whisper_spec(audio)


def _ultravox_projector(config: Json) -> Spec:
    given = {name: config[name] for name in _PROJECTOR_DEFAULTS if config.get(name) is not None}
    spec = {**_PROJECTOR_DEFAULTS, **given, "d_model": _ultravox_tower(config)["d_model"]}
    if spec.pop("num_projector_layers"):
        raise CheckpointError(
            "Ultravox with a transformer projector (num_projector_layers) is not supported.",
            reason="unknown_family",
        )
    return spec


def _ultravox_preprocess(preprocessor: Json) -> Spec:
    # Regardless of its JSON, Ultravox's own processor splits audio into chunks of 30 s, and does not pad
    # shorter audio to 30 s.
    return _mel_spec(preprocessor) | {"padding": "longest", "chunked": True}


ULTRAVOX: Final = ModelFamily(
    name="ultravox",
    tower_class="whisper:Ultravox",
    inputs={"audio": ("audio_features", "audio_lens")},
    tower_prefixes=("audio_tower.",),
    projector_prefixes=("multi_modal_projector.",),
    language_model_prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    shares_features=True,
    tower_spec=_ultravox_tower,
    projector_spec=_ultravox_projector,
    preprocess_spec=_ultravox_preprocess,
    before_cut=lambda _config, _name: True,
    base=BaseCheckpoint(
        part="tower",
        name_in_config=lambda config: config.get("audio_model_id"),
        prefixes=("model.encoder.", "encoder."),
        config_field="audio_config",
    ),
)

FAMILIES: Final = (QWEN2_AUDIO, ULTRAVOX)
