"""Description of a model family: tensor names, and functions that convert published JSON to specs.

Specs contain every field that can change a tower's output. Absent fields are filled with transformers'
defaults, so that an absent field equals its explicit default. Fields that no family describes are kept,
because an unnecessary field only causes cache misses, but a missing field causes wrong results.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

Part = Literal["tower", "projector", "language_model"]
Modality = Literal["image", "video", "audio"]
Json = Mapping[str, Any]
Spec = dict[str, Any]

# Fields that transformers writes to every config. Engines do not read them in a forward pass.
_INERT_WORDS: Final = """
_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash
architectures attention_dropout bad_words_ids begin_suppress_tokens bos_token_id
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
dropout dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id id2label image_token_id image_token_index
initializer_factor initializer_range label2id length_penalty max_length
min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
temperature tf_legacy_loss tie_word_embeddings tokenizer_class top_p
torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache video_token_id
vision_end_token_id vision_start_token_id vision_token_id
"""
_INERT: Final = frozenset(_INERT_WORDS.split())

_INERT_WHEN_OFF: Final = frozenset(
    {"add_cross_attention", "auto_map", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder"}
)
"""Fields that transformers 4 writes even for a disabled feature. A disabled feature has no effect."""

# `model_type` -> `architectures` for which engines run the usual class of this `model_type`.
_USUAL_CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "internvl": ("InternVLForConditionalGeneration",),
    "llama": ("LlamaForCausalLM",),
    "llava": ("LlavaForConditionalGeneration",),
    "llava_next": ("LlavaNextForConditionalGeneration",),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration",),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
}
_CLIP_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD: Final = [0.26862954, 0.26130258, 0.27577711]
_PIXEL_DEFAULTS: Final[Json] = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "do_convert_rgb": True,
    "data_format": "channels_first",
}
_NON_PIXEL_FIELDS: Final = frozenset(
    {
        "_processor_class",
        "_valid_processor_keys",
        "default_to_square",
        "disable_grouping",
        "feature_extractor_type",
        "processor_class",
        "return_tensors",
    }
)
PRECISION_VARIABLES: Final = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change the precision of torch's libraries."""
PIXEL_NORM: Final = "pixel_norm"
"""Name of the input (2, channels) with which a tower normalises raw pixels: a factor and a summand for each
channel."""
USUAL_NUMERIC_CLASS: Final = "any"
"""Numeric class of a process that sets none of these variables."""


def without_inert(config: Json) -> Spec:
    """Return the config without names, token ids, and fields that affect only training or sampling."""
    return {k: v for k, v in config.items() if k not in _INERT and (v or k not in _INERT_WHEN_OFF)}


def unusual_classes(config: Json) -> list[str] | None:
    """Return the config's `architectures` if they are unusual for its `model_type`, else None.

    Engines may run other code for unusual `architectures`.
    """
    found = config.get("architectures")
    names = [str(name) for name in found] if isinstance(found, list) else [str(found)] if found else []
    usual = _USUAL_CLASSES.get(str(config.get("model_type")), ())
    return names if names and names != list(usual) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCheckpoint:
    """Model part that may be in another checkpoint, whose name is in config.json."""

    part: Part
    name_in_config: Callable[[Json], str | None]
    """Function that returns the other checkpoint's name (folder or hub id) from config.json, or None if the
    part is in this checkpoint."""
    prefixes: tuple[str, ...]
    """Prefixes of the part's tensors in the other checkpoint. Other tensors are not read."""
    config_field: str
    """Field of config.json that the other checkpoint's config.json replaces."""


def _whole_config(config: Json, modality: Modality) -> Json:
    return config


def _any_tensor(tensor: str, modality: Modality) -> bool:
    return True


def _any_config(config: Json) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Description of one `model_type`. The spec functions raise CheckpointError for an unsupported config."""

    name: str
    """`model_type` of config.json."""
    tower_class: str
    """Class that computes the tower: "module:Class" in `cornplug.encoder_service.towers`."""
    inputs: Mapping[Modality, tuple[str, ...]]
    """Names of the tower's inputs (the processor's outputs) by modality. A generic family has no names,
    because transformers' own class receives all outputs of the processor."""
    tower_prefixes: tuple[str, ...]
    projector_prefixes: tuple[str, ...]
    language_model_prefixes: tuple[tuple[str, str], ...]
    """(published prefix, normalised prefix) for every naming scheme in use."""
    shares_features: bool
    """Whether the cache stores the tower's output before the projector, so that models with different
    language models can share it."""
    tower_spec: Callable[[Json], Spec]
    """Function that returns the settings in config.json that affect the tower up to the cut (the layer whose
    output is cached), except weights and dtype."""
    projector_spec: Callable[[Json], Spec]
    """Function that returns the settings in config.json that affect the projector, except weights and
    dtype."""
    preprocess_spec: Callable[[Json], Spec]
    """Function that returns all fields of the first modality's processor JSON that affect the tower's
    input."""
    before_cut: Callable[[Json, str], bool]
    """Function that returns, for config.json and a tensor's normalised name, whether the tensor can affect
    the tower's output."""
    processor_defaults: Mapping[Modality, Json] = field(default_factory=dict)
    """Arguments that the model's processor class adds to the processor JSON (transformers'
    `ProcessorKwargs._defaults`). An engine's overrides take precedence."""
    other_preprocess_specs: Mapping[Modality, Callable[[Json], Spec]] = field(default_factory=dict)
    """Functions like `preprocess_spec` for the other modalities in `inputs`, which have their own
    processors."""
    base: BaseCheckpoint | None = None
    fits: Callable[[Json], bool] = _any_config
    """Function that returns whether this description fits the tower in config.json. If not,
    `generic_family.py` describes the tower."""
    config_of: Callable[[Json, Modality], Json] = _whole_config
    """Function that returns config.json without the parts that only other modalities' towers read."""
    reaches: Callable[[str, Modality], bool] = _any_tensor
    """Function that returns whether a tower tensor, by published name, can affect a modality's embeddings."""
    generic: bool = False
    """Whether transformers' own class computes the tower (`generic_family.py`)."""
    normalises_pixels: bool = False
    """Whether the tower also takes raw uint8 pixels, with `PIXEL_NORM` as an additional input."""

    @property
    def first_modality(self) -> Modality:
        """Modality that this family supported first. Its embedding keys do not contain the modality's
        name."""
        return next(iter(self.inputs))

    def preprocess_spec_of(self, modality: Modality) -> Callable[[Json], Spec]:
        """Return the function that computes a modality's preprocessing spec. Raises KeyError if the modality
        is not in `inputs`."""
        if modality == self.first_modality:
            return self.preprocess_spec
        return self.other_preprocess_specs[modality]

    def classify(self, published: str) -> tuple[Part, str]:
        """Return the part and the normalised name of a tensor, from its published name.

        Normalised names of tower and projector tensors have no prefix.
        """
        best: tuple[int, Part, str] = (-1, "language_model", published)
        parts: tuple[tuple[Part, tuple[tuple[str, str], ...]], ...] = (
            ("tower", tuple((p, "") for p in self.tower_prefixes)),
            ("projector", tuple((p, "") for p in self.projector_prefixes)),
            ("language_model", self.language_model_prefixes),
        )
        for part, prefixes in parts:
            for prefix, normal in prefixes:
                if published.startswith(prefix) and len(prefix) > best[0]:
                    best = (len(prefix), part, normal + published[len(prefix) :])
        return best[1], best[2]


def pixel_spec(
    preprocessor: Json, kind: str, defaults: Json, type_field: str = "image_processor_type"
) -> Spec:
    """Return the preprocessor's settings, with defaults filled in if its class is `kind`.

    Args:
        preprocessor: content of preprocessor_config.json.
        kind: name of the processor class to which `defaults` belong.
        defaults: default values of the class, in addition to `_PIXEL_DEFAULTS`.
        type_field: field in which a processor of this modality stores its class.
    """
    # transformers writes null if a field has the class's default.
    given = {k: v for k, v in preprocessor.items() if v is not None and k not in _NON_PIXEL_FIELDS}
    library = _pixel_library(given.pop("backend", None), given.pop("use_fast", None))
    if given.get("device") == "cpu":
        del given["device"]
    found = str(given.pop(type_field, kind)).removesuffix("Fast")
    # Another class has other defaults, so absent fields must not be filled in.
    known = {**_PIXEL_DEFAULTS, **defaults} if found == kind else {}
    return {**known, **given, **library, "kind": found}


def _pixel_library(backend: object, use_fast: object) -> Spec:
    """Return the library with which transformers 5 resizes images: {} for torchvision, else {"backend":
    name}.

    Pixel values from Pillow and torchvision differ by up to 2 of 255.
    """
    if backend is None and use_fast is not None:
        backend = "torchvision" if use_fast else "pil"
    if backend is None:
        backend = "torchvision" if _has_torchvision() else "pil"
    return {} if backend == "torchvision" and _has_torchvision() else {"backend": str(backend)}


@cache
def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def drop_null_sides(spec: Spec) -> Spec:
    """Remove null values from `size` and `crop_size`, which transformers 5 writes explicitly."""
    for name in ("size", "crop_size"):
        if isinstance(spec.get(name), Mapping):
            spec[name] = {k: v for k, v in spec[name].items() if v is not None}
    return spec


# -- numeric class -------------------------------------------------------------------------------
#
# Settings of a process, other than the dtype, can change the results of torch's libraries. A numeric class
# identifies these settings. It is part of embedding keys, in engines and in the encoder service. Only
# processes of the same class share embeddings.


def current_numeric_class() -> str:
    """Return the numeric class of this process. Processes of the same class compute the same embeddings."""
    given = {name: os.environ[name] for name in PRECISION_VARIABLES if os.environ.get(name)}
    return f"{USUAL_NUMERIC_CLASS} {json.dumps(given, sort_keys=True)}" if given else USUAL_NUMERIC_CLASS
