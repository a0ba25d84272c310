"""What we know of model families: where tower and projector lie, and what else shapes them.

A family is a row of names and three pure functions from published JSON to specs. Specs
hold every field that can change a tower's output, with the defaults of transformers filled
in, so that an absent field and its explicit default agree. A field unknown here is kept: a
spec that says too much costs a miss, one that says too little a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from cornplug.errors import CheckpointError

Part = Literal["tower", "projector", "language_model"]
Json = Mapping[str, Any]
Spec = dict[str, Any]

# What transformers writes into any config and no forward pass of an engine reads.
_INERT_WORDS: Final = """
_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash add_cross_attention
architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
dropout dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id id2label image_token_id image_token_index
initializer_factor initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_p
torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache video_token_id
vision_end_token_id vision_start_token_id vision_token_id
"""
_INERT: Final = frozenset(_INERT_WORDS.split())


def without_inert(config: Json) -> Spec:
    """A config without names, token ids, training and sampling fields."""
    return {k: v for k, v in config.items() if k not in _INERT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. The three spec functions raise CheckpointError for what they do not know."""

    name: str
    tower_prefixes: tuple[str, ...]
    projector_prefixes: tuple[str, ...]
    language_model_prefixes: tuple[tuple[str, str], ...]
    """(prefix as published, normalised prefix) of every generation of names."""
    shares_features: bool
    """Whether the tower's output is worth keeping before the projector, for other LLMs."""
    tower_spec: Callable[[Json], Spec]
    """config.json -> what shapes the tower up to the cut, besides weights and dtype."""
    projector_spec: Callable[[Json], Spec]
    """config.json -> what shapes the projector, besides weights and dtype."""
    preprocess_spec: Callable[[Json], Spec]
    """preprocessor_config.json -> every field that changes the tower's input."""
    before_cut: Callable[[Json, str], bool]
    """(config.json, normalised tower tensor) -> whether it can reach the tower's output."""

    def classify(self, published: str) -> tuple[Part, str]:
        """Part and normalised name of a tensor. Tower and projector names lose their prefix."""
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


# --- LLaVA 1.5: a CLIP tower cut at `vision_feature_layer`, then a two-layer projector ---

_CLIP_DEFAULTS: Final[Json] = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_LLAVA_CLIP: Final[Json] = {
    # LlavaConfig's own tower when config.json has no vision_config at all.
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def _clip(config: Json) -> Spec:
    given = config.get("vision_config")
    vision = {**_CLIP_DEFAULTS, **(_LLAVA_CLIP if given is None else given)}
    if vision["model_type"] != "clip_vision_model":
        raise CheckpointError(
            f"LLaVA with a {vision['model_type']!r} tower is not supported. Towers known: clip_vision_model.",
            reason="unknown_family",
        )
    return vision


def _feature_layers(config: Json) -> list[int]:
    """`vision_feature_layer` as indices from the first hidden state (0: the embeddings)."""
    depth = int(_clip(config)["num_hidden_layers"])
    layers = config.get("vision_feature_layer", -2)
    # One index and a list of that index give the same features.
    wanted = [layers] if isinstance(layers, int) else list(layers)
    absolute = [depth + 1 + i if i < 0 else i for i in wanted]
    if not absolute or not all(0 <= i <= depth for i in absolute):
        raise CheckpointError(
            f"vision_feature_layer {layers!r} is outside a tower of {depth} layers.", reason="bad_config"
        )
    return absolute


def _llava_tower(config: Json) -> Spec:
    vision = without_inert(_clip(config))
    # Depth beyond the cut and CLIP's contrastive head do not reach the features.
    for name in ("num_hidden_layers", "projection_dim", "vocab_size", "logit_scale_init_value"):
        vision.pop(name, None)
    return vision | {
        "feature_layers": _feature_layers(config),
        "feature_select": config.get("vision_feature_select_strategy", "default"),
    }


def _llava_projector(config: Json) -> Spec:
    return {
        "hidden_act": config.get("projector_hidden_act", "gelu"),
        "bias": config.get("multimodal_projector_bias", True),
    }


def _clip_before_cut(config: Json, name: str) -> bool:
    """With LLaVA's default layer -2, CLIP's last layer and its final norm never run.

    At layer -1 the final norm counts: vLLM applies it there.
    """
    layers, depth = _feature_layers(config), int(_clip(config)["num_hidden_layers"])
    if name.startswith("encoder.layers."):
        return int(name.split(".")[2]) < max(layers)
    if name.startswith("post_layernorm."):
        return max(layers) == depth
    return not name.endswith("position_ids")


# --- Qwen2-VL: a tower of its own per size, and a merger that shrinks its output ---

_QWEN2_VISION_DEFAULTS: Final[Json] = {
    "model_type": "qwen2_vl",
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _qwen2_vision(config: Json) -> Spec:
    given = dict(config.get("vision_config") or {})
    if "in_chans" in given:
        given.setdefault("in_channels", given.pop("in_chans"))
    vision = without_inert({**_QWEN2_VISION_DEFAULTS, **given})
    # transformers 4 and 5 name the sub-config differently; both mean this tower.
    vision["model_type"] = "qwen2_vl_vision"
    for unread in ("spatial_patch_size", "in_chans"):
        vision.pop(unread, None)
    if vision.get("rope_parameters") in (None, _QWEN2_VISION_ROPE):
        vision.pop("rope_parameters", None)
    return vision


_QWEN2_VISION_ROPE: Final[Json] = {"rope_theta": 10000.0, "rope_type": "axial"}


def _qwen2_tower(config: Json) -> Spec:
    return {k: v for k, v in _qwen2_vision(config).items() if k != "hidden_size"}


def _qwen2_projector(config: Json) -> Spec:
    vision = _qwen2_vision(config)
    return {k: vision[k] for k in ("embed_dim", "hidden_size", "spatial_merge_size")}


# --- preprocessing ---

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
_NO_PIXELS: Final = frozenset(
    {
        "_processor_class",
        "_valid_processor_keys",
        "auto_map",
        "default_to_square",
        "device",
        "disable_grouping",
        "feature_extractor_type",
        "processor_class",
        "return_tensors",
        "use_fast",
    }
)


def _pixels(preprocessor: Json, kind: str, defaults: Json) -> Spec:
    # A null is transformers' way to say "the class's default".
    given = {k: v for k, v in preprocessor.items() if v is not None and k not in _NO_PIXELS}
    found = str(given.pop("image_processor_type", kind))
    return {**_PIXEL_DEFAULTS, **defaults, **given, "kind": found.removesuffix("Fast").removesuffix("Pil")}


def _clip_preprocess(preprocessor: Json) -> Spec:
    spec = _pixels(
        preprocessor,
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
    )
    if isinstance(spec["size"], int):
        square = preprocessor.get("default_to_square", False)
        n = spec["size"]
        spec["size"] = {"height": n, "width": n} if square else {"shortest_edge": n}
    if isinstance(spec["crop_size"], int):
        spec["crop_size"] = {"height": spec["crop_size"], "width": spec["crop_size"]}
    return _known_sides(spec)


def _qwen2_preprocess(preprocessor: Json) -> Spec:
    spec = _pixels(
        preprocessor,
        "Qwen2VLImageProcessor",
        {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    )
    # As Qwen2VLImageProcessor does: min_pixels and max_pixels override size.
    size = dict(spec.pop("size", None) or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    for pixels, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = spec.pop(pixels, size.pop(pixels, None))
        if value is not None:
            size[edge] = value
    spec["size"] = size
    return _known_sides(spec)


def _known_sides(spec: Spec) -> Spec:
    """Drop null sides, which transformers 5 writes out in full."""
    for name in ("size", "crop_size"):
        if isinstance(spec.get(name), Mapping):
            spec[name] = {k: v for k, v in spec[name].items() if v is not None}
    return spec


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llava": Family(
            name="llava",
            tower_prefixes=(
                "vision_tower.vision_model.",
                "model.vision_tower.vision_model.",
                "vision_tower.",
                "model.vision_tower.",
            ),
            projector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
            language_model_prefixes=(
                ("language_model.model.", "model."),
                ("model.language_model.", "model."),
                ("language_model.lm_head.", "lm_head."),
            ),
            shares_features=True,
            tower_spec=_llava_tower,
            projector_spec=_llava_projector,
            preprocess_spec=_clip_preprocess,
            before_cut=_clip_before_cut,
        ),
        "qwen2_vl": Family(
            name="qwen2_vl",
            tower_prefixes=("visual.", "model.visual."),
            projector_prefixes=("visual.merger.", "model.visual.merger."),
            language_model_prefixes=(
                ("model.language_model.", "model."),
                ("language_model.model.", "model."),
                ("language_model.lm_head.", "lm_head."),
            ),
            shares_features=False,
            tower_spec=_qwen2_tower,
            projector_spec=_qwen2_projector,
            preprocess_spec=_qwen2_preprocess,
            before_cut=lambda _config, name: not name.endswith("inv_freq"),
        ),
    }
)
