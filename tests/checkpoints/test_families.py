"""Families: names of either generation, and specs that hold what changes a tower's output."""

from __future__ import annotations

from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.checkpoints import model_family as base
from cornplug.checkpoints.families import FAMILIES, without_inert
from cornplug.errors import CheckpointError
from cornplug.identity import canonical_json
from devkit.checkpoints.bare import CLIP_PREPROCESSOR, LLAVA_CONFIG, QWEN2_VL_CONFIG

LLAVA, QWEN2_VL = FAMILIES["llava"], FAMILIES["qwen2_vl"]


@pytest.mark.parametrize(
    ("family", "published", "part", "normal"),
    [
        ("llava", "vision_tower.vision_model.encoder.layers.0.fc1.w", "tower", "encoder.layers.0.fc1.w"),
        ("llava", "model.vision_tower.encoder.layers.0.fc1.w", "tower", "encoder.layers.0.fc1.w"),
        ("llava", "vision_tower.embeddings.class_embedding", "tower", "embeddings.class_embedding"),
        ("llava", "multi_modal_projector.linear_1.bias", "projector", "linear_1.bias"),
        ("llava", "model.multi_modal_projector.linear_1.bias", "projector", "linear_1.bias"),
        ("llava", "language_model.model.norm.weight", "language_model", "model.norm.weight"),
        ("llava", "model.language_model.norm.weight", "language_model", "model.norm.weight"),
        ("llava", "language_model.lm_head.weight", "language_model", "lm_head.weight"),
        ("llava", "lm_head.weight", "language_model", "lm_head.weight"),
        ("llava", "language_model.model.layers.0.up.qweight", "language_model", "model.layers.0.up.qweight"),
        ("qwen2_vl", "visual.blocks.0.norm1.weight", "tower", "blocks.0.norm1.weight"),
        ("qwen2_vl", "model.visual.blocks.0.norm1.weight", "tower", "blocks.0.norm1.weight"),
        ("qwen2_vl", "visual.merger.ln_q.weight", "projector", "ln_q.weight"),
        ("qwen2_vl", "model.visual.merger.ln_q.weight", "projector", "ln_q.weight"),
        ("qwen2_vl", "model.layers.0.up.weight", "language_model", "model.layers.0.up.weight"),
        ("qwen2_vl", "model.language_model.layers.0.up.weight", "language_model", "model.layers.0.up.weight"),
        ("qwen2_vl", "lm_head.weight", "language_model", "lm_head.weight"),
        ("qwen2_5_vl", "visual.blocks.0.mlp.gate_proj.weight", "tower", "blocks.0.mlp.gate_proj.weight"),
        ("qwen3_vl", "model.visual.merger.norm.weight", "projector", "norm.weight"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.norm.weight", "projector", "0.norm.weight"),
        ("qwen3_vl", "model.visual.pos_embed.weight", "tower", "pos_embed.weight"),
        ("qwen3_vl_moe", "model.visual.pos_embed.weight", "tower", "pos_embed.weight"),
    ],
)  # fmt: skip
def test_families_published_name_is_classified(family: str, published: str, part: str, normal: str) -> None:
    assert FAMILIES[family].classify(published) == (part, normal)


def test_families_features_are_shared_by_separate_towers_only() -> None:
    assert LLAVA.shares_features
    assert not QWEN2_VL.shares_features


# --- the cut ---


def _llava(**fields: Any) -> dict[str, Any]:
    vision = {**LLAVA_CONFIG["vision_config"], **fields.pop("vision", {})}
    return {**LLAVA_CONFIG, "vision_config": vision, **fields}


@pytest.mark.parametrize(
    ("layer", "layers_run"),
    [(-2, 2), (2, 2), ([-2], 2), ([1, -2], 2), (-1, 3), ([0, -1], 3), (-4, 0)],
)
def test_families_layers_behind_the_cut_do_not_count(layer: int | list[int], layers_run: int) -> None:
    config = _llava(vision_feature_layer=layer)
    seen = [LLAVA.before_cut(config, f"encoder.layers.{i}.mlp.fc1.weight") for i in range(3)]
    assert seen == [i < layers_run for i in range(3)]
    assert not LLAVA.before_cut(config, "post_layernorm.weight")
    assert LLAVA.before_cut(config, "pre_layrnorm.weight")
    assert LLAVA.before_cut(config, "embeddings.position_embedding.weight")
    assert not LLAVA.before_cut(config, "embeddings.position_ids")


def test_families_spellings_of_one_feature_layer_agree() -> None:
    specs = {
        canonical_json(LLAVA.tower_spec(_llava(vision_feature_layer=layer))) for layer in (-2, 2, [-2], [2])
    }
    specs.add(
        canonical_json(LLAVA.tower_spec({k: v for k, v in _llava().items() if k != "vision_feature_layer"}))
    )
    assert len(specs) == 1


def test_families_order_and_number_of_feature_layers_count() -> None:
    layers: list[Any] = [-2, -1, [-2, -1], [-1, -2]]
    assert len({canonical_json(LLAVA.tower_spec(_llava(vision_feature_layer=x))) for x in layers}) == 4


@pytest.mark.parametrize("layer", [4, -5, [-2, 9], []])
def test_families_feature_layer_outside_the_tower_is_refused(layer: int | list[int]) -> None:
    with pytest.raises(CheckpointError) as caught:
        LLAVA.tower_spec(_llava(vision_feature_layer=layer))
    assert caught.value.reason == "bad_config"


@pytest.mark.parametrize("name", FAMILIES)
def test_families_description_fits_all_but_llava_over_another_tower(name: str) -> None:
    """That one is computed by transformers' class (`generic_family.py`)."""
    other = {"model_type": name, "vision_config": {"model_type": "pixtral"}}
    assert FAMILIES[name].fits(other) == (name != "llava")
    assert FAMILIES[name].fits({"model_type": name})


def test_llava_other_tower_is_refused_not_guessed() -> None:
    with expect_error(CheckpointError, reason="unknown_family", match="pixtral"):
        LLAVA.tower_spec(_llava(vision={"model_type": "pixtral"}))


# --- tower and projector specs ---


def test_tower_spec_depth_behind_the_cut_does_not_count() -> None:
    deeper = _llava(vision={"num_hidden_layers": 5}, vision_feature_layer=2)
    assert LLAVA.tower_spec(deeper) == LLAVA.tower_spec(_llava(vision_feature_layer=2))


@pytest.mark.parametrize(
    "change",
    [
        {"vision": {"hidden_act": "gelu"}},
        {"vision": {"layer_norm_eps": 1e-6}},
        {"vision": {"num_attention_heads": 4}},
        {"vision": {"image_size": 112}},
        {"vision": {"some_new_field": 1}},
        {"vision_feature_select_strategy": "full"},
        {"vision_feature_layer": -1},
    ],
)
def test_fields_that_change_a_clip_tower_count(change: dict[str, Any]) -> None:
    assert LLAVA.tower_spec(_llava(**change)) != LLAVA.tower_spec(_llava())


@pytest.mark.parametrize(
    "noise",
    [
        {"torch_dtype": "float16"},
        {"transformers_version": "4.37.2"},
        {"_name_or_path": "/somewhere/else"},
        {"projection_dim": 768},
        {"initializer_range": 0.5},
        {"hidden_act": "quick_gelu"},  # the class's default, spelled out
        {"layer_norm_eps": 1e-05},
    ],
)
def test_tower_spec_names_training_fields_and_defaults_do_not_count(noise: dict[str, Any]) -> None:
    assert LLAVA.tower_spec(_llava(vision=noise)) == LLAVA.tower_spec(_llava())


def test_llava_without_vision_config_has_the_class_s_tower() -> None:
    spec = LLAVA.tower_spec({"model_type": "llava"})
    assert (spec["hidden_size"], spec["image_size"], spec["patch_size"]) == (1024, 336, 14)
    assert spec["feature_layers"] == [23]


def test_families_projector_activation_and_bias_count() -> None:
    specs = [
        LLAVA.projector_spec(c)
        for c in ({}, {"projector_hidden_act": "relu"}, {"multimodal_projector_bias": False})
    ]
    assert len({canonical_json(spec) for spec in specs}) == 3
    assert LLAVA.projector_spec({"projector_hidden_act": "gelu"}) == specs[0]


def test_qwen2_vl_wider_llm_changes_merger_not_tower() -> None:
    wide = {**QWEN2_VL_CONFIG, "vision_config": {**QWEN2_VL_CONFIG["vision_config"], "hidden_size": 8}}
    assert QWEN2_VL.tower_spec(wide) == QWEN2_VL.tower_spec(QWEN2_VL_CONFIG)
    assert QWEN2_VL.projector_spec(wide) != QWEN2_VL.projector_spec(QWEN2_VL_CONFIG)


@pytest.mark.parametrize(
    ("kind", "width"),
    [("qwen2_vl", "hidden_size"), ("qwen2_5_vl", "out_hidden_size"), ("qwen3_vl", "out_hidden_size")],
)
def test_families_qwen_defaults_equal_transformers(kind: str, width: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    family, whole = FAMILIES[kind], {"vision_config": config.vision_config.to_dict()}
    assert canonical_json(family.tower_spec(whole)) == canonical_json(family.tower_spec({}))
    assert canonical_json(family.projector_spec(whole)) == canonical_json(family.projector_spec({}))
    wide = {"vision_config": {**whole["vision_config"], width: 8}}
    assert family.tower_spec(wide) == family.tower_spec(whole)
    assert family.projector_spec(wide) != family.projector_spec(whole)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen2_5_vl", {"window_size": 56}),
        ("qwen2_5_vl", {"fullatt_block_indexes": [0]}),
        ("qwen3_vl", {"deepstack_visual_indexes": [8, 16]}),
        ("qwen3_vl", {"num_position_embeddings": 1024}),
    ],
)
def test_fields_that_change_a_qwen_tower_count(kind: str, change: dict[str, Any]) -> None:
    tower = FAMILIES[kind].tower_spec
    assert tower({"vision_config": change}) != tower({})
    # How fast frames follow is the LLM's business.
    assert tower({"vision_config": {"tokens_per_second": 25}}) == tower({})


@pytest.mark.parametrize("levels", [[16, 8], [8, 8], [27], [-1]])
def test_families_levels_in_ambiguous_order_are_refused(levels: list[int]) -> None:
    with expect_error(CheckpointError, reason="bad_config", match="deepstack_visual_indexes"):
        FAMILIES["qwen3_vl"].tower_spec({"vision_config": {"deepstack_visual_indexes": levels}})


def test_qwen2_vl_reads_alike_from_transformers_4_and_5() -> None:
    four = {"depth": 1, "embed_dim": 4, "in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_vl"}
    five = {
        **{
            "depth": 1,
            "embed_dim": 4,
            "in_channels": 3,
            "model_type": "qwen2_vl_vision",
            "initializer_range": 0.02,
        },
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    }
    assert QWEN2_VL.tower_spec({"vision_config": four}) == QWEN2_VL.tower_spec({"vision_config": five})
    other = {**five, "rope_parameters": {"rope_theta": 5.0, "rope_type": "axial"}}
    assert QWEN2_VL.tower_spec({"vision_config": other}) != QWEN2_VL.tower_spec({"vision_config": five})


# --- preprocessing ---


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 2},
        {"size": {"shortest_edge": 224}},
        {"crop_size": {"height": 224, "width": 224}},
        {"do_resize": False},
        {"do_center_crop": False},
        {"do_rescale": False},
        {"rescale_factor": 1.0},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.5]},
        {"do_convert_rgb": False},
        {"do_pad": True},
        {"some_new_field": 3},
        {"image_processor_type": "SiglipImageProcessor"},
    ],
)
def test_fields_that_change_pixels_count(change: dict[str, Any]) -> None:
    changed = LLAVA.preprocess_spec({**CLIP_PREPROCESSOR, **change})
    assert changed != LLAVA.preprocess_spec(CLIP_PREPROCESSOR)


@pytest.mark.parametrize(
    "noise",
    [
        {"processor_class": "LlavaProcessor"},
        {"image_processor_type": "CLIPImageProcessorFast"},
        {"use_fast": True},
        {"device": "cpu"},
        {"feature_extractor_type": "CLIPFeatureExtractor"},
        {"device": None, "data_format": "channels_first", "do_pad": None},
        {"do_normalize": True, "rescale_factor": 0.00392156862745098},
        {"size": 336, "crop_size": 336},
        {"size": {"shortest_edge": 336, "height": None, "width": None}},
    ],
)
def test_families_processor_names_and_defaults_do_not_count(noise: dict[str, Any]) -> None:
    assert LLAVA.preprocess_spec({**CLIP_PREPROCESSOR, **noise}) == LLAVA.preprocess_spec(CLIP_PREPROCESSOR)


@pytest.mark.parametrize(
    "asked",
    [
        {"use_fast": False},
        {"backend": "pil"},
        {"device": "cuda"},
        {"image_processor_type": "CLIPImageProcessorPil"},
        {"auto_map": {"AutoImageProcessor": "x.Y"}},
    ],
)
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_families_library_that_makes_pixels_counts(kind: str, asked: dict[str, Any]) -> None:
    """Pillow and torchvision resize to other pixels, and a GPU to others again."""
    spec = FAMILIES[kind].preprocess_spec
    assert spec({**CLIP_PREPROCESSOR, **asked}) != spec(CLIP_PREPROCESSOR)


def test_families_without_torchvision_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LLAVA.preprocess_spec(CLIP_PREPROCESSOR)
    monkeypatch.setattr(base, "_has_torchvision", lambda: False)
    assert LLAVA.preprocess_spec(CLIP_PREPROCESSOR) == {**usual, "backend": "pil"}


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_families_preprocess_defaults_equal_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    name = {"llava": "CLIPImageProcessor", "qwen2_vl": "Qwen2VLImageProcessor"}[kind]
    written = getattr(transformers, name)().to_dict()
    assert {"resample", "image_mean", "size", "rescale_factor"} <= written.keys()
    spec = FAMILIES[kind].preprocess_spec
    assert canonical_json(spec(written)) == canonical_json(spec({}))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_families_video_preprocess_defaults_equal_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[kind]
    spec = family.preprocess_spec_of("video")
    made = getattr(transformers, str(spec({})["kind"]))()
    assert canonical_json(spec(made.to_dict())) == canonical_json(spec({}))
    # None means False until transformers 5.22 and True from there on: then the default here must follow.
    assert made.cap_pixels_per_frame is None


@pytest.mark.parametrize(
    "change",
    [
        {"max_frames": 8}, {"fps": 4}, {"num_frames": 6}, {"do_sample_frames": True}, {"max_pixels": 50176},
        {"size": {"shortest_edge": 1, "longest_edge": 2}}, {"cap_pixels_per_frame": True},
        {"temporal_patch_size": 1}, {"video_processor_type": "Other"}, {"image_processor_type": "Other"},
    ],
)  # fmt: skip
def test_fields_that_change_a_video_s_frames_count(change: dict[str, Any]) -> None:
    spec = QWEN2_VL.preprocess_spec_of("video")
    assert spec(change) != spec({})
    assert spec({"processor_class": "Qwen2VLProcessor"}) == spec({})


def test_families_every_modality_has_a_preprocess_spec() -> None:
    for family in FAMILIES.values():
        specs = [canonical_json(family.preprocess_spec_of(modality)({})) for modality in family.inputs]
        assert len(set(specs)) == len(family.inputs)


def test_qwen2_vl_s_pixel_bounds_override_size() -> None:
    by_size = QWEN2_VL.preprocess_spec({"size": {"shortest_edge": 3136, "longest_edge": 50176}})
    assert by_size == QWEN2_VL.preprocess_spec({"min_pixels": 3136, "max_pixels": 50176})
    assert by_size == QWEN2_VL.preprocess_spec(
        {"max_pixels": 50176, "size": {"shortest_edge": 3136, "longest_edge": 9}}
    )
    assert by_size == QWEN2_VL.preprocess_spec({"size": {"min_pixels": 3136, "max_pixels": 50176}})
    assert by_size != QWEN2_VL.preprocess_spec({"max_pixels": 50177})
    assert QWEN2_VL.preprocess_spec({"merge_size": 1}) != QWEN2_VL.preprocess_spec({})


def test_families_specs_are_json() -> None:
    for family, config in ((LLAVA, LLAVA_CONFIG), (QWEN2_VL, QWEN2_VL_CONFIG)):
        for spec in (family.tower_spec(config), family.projector_spec(config), family.preprocess_spec({})):
            assert canonical_json(spec)


def test_without_inert_fields_never_hold_a_models_shape() -> None:
    shape = {
        "hidden_size",
        "num_hidden_layers",
        "rope_scaling",
        "sliding_window",
        "rms_norm_eps",
        "hidden_act",
    }
    assert without_inert(dict.fromkeys(shape, 1)).keys() == shape


# --- audio ---


@pytest.mark.parametrize("family", ["qwen2_audio", "ultravox"])
@pytest.mark.parametrize(
    "change",
    [
        {"feature_size": 128},
        {"hop_length": 80},
        {"n_fft": 512},
        {"chunk_length": 20},
        {"sampling_rate": 8000},
        {"dither": 0.1},
        {"padding_value": 1.0},
        {"do_normalize": True},
        {"some_new_field": 1},
    ],
)
def test_fields_that_change_a_mel_count(family: str, change: dict[str, Any]) -> None:
    spec = FAMILIES[family].preprocess_spec
    assert spec(change) != spec({})


@pytest.mark.parametrize(
    "noise",
    [
        {"mel_filters": [[0.0, 1.0]]},
        {"n_samples": 480_000, "nb_max_frames": 3000},
        {"processor_class": "WhisperProcessor", "return_attention_mask": True},
        {"feature_extractor_type": "WhisperFeatureExtractor", "hop_length": 160, "padding_side": "right"},
    ],
)
def test_families_fields_outside_the_mel_do_not_count(noise: dict[str, Any]) -> None:
    spec = FAMILIES["qwen2_audio"].preprocess_spec
    assert spec(noise) == spec({})


def test_families_whisper_decoder_and_training_do_not_count() -> None:
    spec = FAMILIES["ultravox"].tower_spec
    plain = {"audio_config": {"model_type": "whisper", "d_model": 64}}
    whole = {"decoder_layers": 4, "vocab_size": 51_866, "mask_time_prob": 0.05, "median_filter_width": 7}
    noisy = {"audio_config": {**plain["audio_config"], **whole, "encoder_layerdrop": 0.0, "dropout": 0.1}}
    assert spec(noisy) == spec(plain)
    assert spec({"audio_config": {"d_model": 64, "activation_function": "relu"}}) != spec(plain)


@pytest.mark.parametrize(("family", "tower"), [("qwen2_audio", "whisper"), ("ultravox", "wav2vec2")])
def test_families_other_tower_under_audio_model_is_refused(family: str, tower: str) -> None:
    with expect_error(CheckpointError, reason="unknown_family", match=tower):
        FAMILIES[family].tower_spec({"audio_config": {"model_type": tower}})
