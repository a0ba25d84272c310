"""Model families that `families.py` does not list. Their identity does not depend on tensor names.

    all tensors outside the decoder ─┐
    all of config.json ──────────────┼─> identity
    every processor's JSON ──────────┤
    versions of the code ────────────┘

transformers' own class computes the tower (`cornplug.encoder_service.towers.generic`) from only the tensors
in the identity, so no other tensor can change an embedding. An unnecessary field in the identity only
causes cache misses, but a missing field would cause wrong embeddings.

A model may have one tower for images and videos and another tower for audio. Tensors and settings whose names
belong to one tower are excluded from the other tower's identity and model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from cornplug.checkpoints.model_family import Json, Modality, ModelFamily, Spec

PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
)
"""Files of a checkpoint from which a transformers processor reads settings."""
_CODE: Final = ("transformers", "torchvision", "timm")
"""Packages with the code of towers and processors."""
_UNREAD_CONFIG: Final = (
    "_name_or_path",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
"""Fields of config.json that are ignored. The service chooses the dtype itself, and `Checkpoint` handles
quantised towers."""
_UNREAD_TOKENIZER: Final = ("chat_template", "name_or_path")
_DECODER: Final = re.compile(
    r"(^|\.)(language_model|text_model|llm|lm_head|embed_tokens)\."
    r"|^(thinker\.)?(model\.)?(layers\.\d+|norm)\."
    r"|^(talker|token2wav|code2wav|mtp)\."
)


_AUDIO: Final = re.compile(r"(^|\.)(audio_\w+|embed_audio|speech_\w+)\.")
_VISION: Final = re.compile(r"(^|\.)(vision_\w+|visual|embed_vision|image_\w+|video_\w+)\.")
_OTHER_TENSORS: Final[Mapping[Modality, re.Pattern[str]]] = {
    "image": _AUDIO,
    "video": _AUDIO,
    "audio": _VISION,
}
_OTHER_CONFIG: Final[Mapping[Modality, str]] = {
    "image": "audio_config",
    "video": "audio_config",
    "audio": "vision_config",
}
_OTHER_PROCESSORS: Final[Mapping[Modality, frozenset[str]]] = {
    "image": frozenset({"feature_extractor"}),
    "video": frozenset({"feature_extractor"}),
    "audio": frozenset({"image_processor", "video_processor", "video_preprocessor_config.json"}),
}
"""Fields of processor_config.json, and a file, that only other modalities use, by modality."""
_TYPE_FIELDS: Final[Mapping[Modality, str]] = {
    "image": "image_processor_type",
    "video": "video_processor_type",
    "audio": "feature_extractor_type",
}
NESTED_CONFIG_FIELD: Final = "thinker_config"
"""Field of config.json that contains the towers' and decoder's configs in models that also generate
speech."""


def is_decoder_tensor(name: str) -> bool:
    """Return whether a tensor with this published name belongs to the decoder or its head.

    Tensors of a decoder with other names count as part of the tower, so the identity depends on them.
    """
    return _DECODER.search(name) is not None


def is_other_modality(name: str, modality: Modality) -> bool:
    """Return whether a tensor belongs to another modality's tower.

    `name` is the name of the tensor, or of a module followed by a dot.
    """
    return _OTHER_TENSORS[modality].search(name) is not None


def generic_family(config: Json, processors: Mapping[Modality, Json]) -> ModelFamily | None:
    """Return the family of a checkpoint that no module describes, or None if it has neither images nor audio.

    `processors` is the JSON of each modality's processor.
    """
    name = config.get("model_type")
    taken = tuple(m for m, field in _TYPE_FIELDS.items() if field in processors[m])
    # The JSON of old image processors also has the feature extractor's field.
    if "audio" in taken and "audio" not in json.dumps(config):
        taken = tuple(m for m in taken if m != "audio")
    if not isinstance(name, str) or not {"image", "audio"} & set(taken):
        return None
    return _create_family(name, taken)


@cache
def _create_family(name: str, modalities: tuple[Modality, ...]) -> ModelFamily:
    return ModelFamily(
        name=name,
        tower_class="generic:GenericArchitecture",
        inputs=dict.fromkeys(modalities, ()),
        tower_prefixes=(),
        projector_prefixes=(),
        language_model_prefixes=(),
        shares_features=False,
        tower_spec=_tower,
        projector_spec=lambda config: {},
        preprocess_spec=dict,
        other_preprocess_specs=dict.fromkeys(modalities[1:], dict),
        before_cut=lambda config, tensor: not is_decoder_tensor(tensor),
        config_of=_config_for_modality,
        reaches=lambda tensor, modality: not is_other_modality(tensor, modality),
        generic=True,
    )


def _config_for_modality(config: Json, modality: Modality) -> Json:
    other = _OTHER_CONFIG[modality]
    kept = {k: v for k, v in config.items() if not (k == other and isinstance(v, Mapping))}
    nested = kept.get(NESTED_CONFIG_FIELD)
    return (
        kept | {NESTED_CONFIG_FIELD: _config_for_modality(nested, modality)}
        if isinstance(nested, Mapping)
        else kept
    )


def _tower(config: Json) -> Spec:
    # Include the decoder's config, because some families scale embeddings by the decoder's width.
    return {
        "config": {k: v for k, v in config.items() if k not in _UNREAD_CONFIG},
        "code": _package_versions(),
    }


@cache
def _package_versions() -> Spec:
    found: Spec = {}
    for package in _CODE:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def processor_spec(files: Mapping[str, Json], modality: Modality) -> Spec:
    """Return all settings of a checkpoint's processors, except separate settings of other modalities.

    `files` contains the contents of `PROCESSOR_FILES`.
    """
    other = _OTHER_PROCESSORS[modality]
    left_out = {
        "tokenizer_config.json": frozenset(_UNREAD_TOKENIZER),
        "processor_config.json": other,
    }
    return {
        name: {k: v for k, v in content.items() if k not in left_out.get(name, ())}
        for name, content in files.items()
        if name not in other
    }
