"""Families of tiles and poolings: their silent defaults are transformers' own, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.checkpoints.families import FAMILIES
from cornplug.errors import CheckpointError
from cornplug.identity import canonical_json

transformers = pytest.importorskip("transformers")

CLASSES = {
    "llava": ("LlavaConfig", "CLIPImageProcessor", "LlavaProcessor"),
    "llava_next": ("LlavaNextConfig", "LlavaNextImageProcessor", "LlavaNextProcessor"),
    "llava_onevision": ("LlavaOnevisionConfig", "LlavaOnevisionImageProcessor", "LlavaOnevisionProcessor"),
    "internvl": ("InternVLConfig", "GotOcr2ImageProcessor", "InternVLProcessor"),
    "gemma3": ("Gemma3Config", "Gemma3ImageProcessor", "Gemma3Processor"),
}
TILED = [name for name in CLASSES if name != "llava"]


@pytest.mark.parametrize("name", CLASSES)
def test_tile_families_silent_config_has_transformers_defaults(name: str) -> None:
    family = FAMILIES[name]
    written = getattr(transformers, CLASSES[name][0])().to_dict()
    assert canonical_json(family.tower_spec(written)) == canonical_json(
        family.tower_spec({"model_type": name})
    )
    assert canonical_json(family.projector_spec(written)) == canonical_json(
        family.projector_spec({"model_type": name})
    )


@pytest.mark.parametrize("name", TILED)
def test_tile_families_silent_preprocessor_has_transformers_defaults(name: str) -> None:
    written = getattr(transformers, CLASSES[name][1])().to_dict()
    spec = FAMILIES[name].preprocess_spec
    assert canonical_json(spec(written)) == canonical_json(spec({}))
    assert spec({})["kind"] == CLASSES[name][1]


@pytest.mark.parametrize("name", CLASSES)
def test_tile_families_processor_defaults_equal_the_processor_class(name: str) -> None:
    """transformers lays it over the file; who read the file alone would share unlike embeddings."""
    kwargs = getattr(transformers, CLASSES[name][2]).valid_processor_kwargs
    wanted = kwargs._defaults.get("images_kwargs", {})
    assert FAMILIES[name].processor_defaults.get("image", {}) == wanted


def test_tile_families_file_of_other_class_gets_no_defaults() -> None:
    """Its own defaults are others: silent, it must not look like one that says CLIP's mean."""
    silent = {"image_processor_type": "SiglipImageProcessor"}
    spec = FAMILIES["llava"].preprocess_spec
    mean = spec({})["image_mean"]
    assert canonical_json(spec(silent)) != canonical_json(spec({**silent, "image_mean": mean}))


@pytest.mark.parametrize("name", ["gemma3", "llava", "llava_next", "llava_onevision"])
def test_tile_families_siglip_head_does_not_count(name: str) -> None:
    family = FAMILIES[name]
    config: dict[str, Any] = {"model_type": name, "vision_config": {"model_type": "siglip_vision_model"}}
    if name != "llava_onevision":
        config["vision_feature_select_strategy"] = "full"
    assert not family.before_cut(config, "head.probe")
    assert family.before_cut(config, "encoder.layers.0.mlp.fc1.weight")
    with_head = {**config, "vision_config": {**config["vision_config"], "vision_use_head": True}}
    assert family.tower_spec(with_head) == family.tower_spec(config)


def test_tile_families_gemma3_final_norm_and_pooling_count() -> None:
    gemma = FAMILIES["gemma3"]
    assert gemma.before_cut({}, "post_layernorm.weight")
    assert gemma.tower_spec({"mm_tokens_per_image": 64}) != gemma.tower_spec({})


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"do_pan_and_scan": True}, True),
        ({"pan_and_scan_max_num_crops": 8}, False),  # of crops that are not made
        ({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 8}, True),
        ({"image_seq_length": 64}, False),
        ({"do_convert_rgb": None}, False),
        ({"size": {"height": 448, "width": 448}}, True),
    ],
)
def test_tile_families_gemma3_fields_that_change_pixels_count(change: dict[str, Any], counts: bool) -> None:
    spec = FAMILIES["gemma3"].preprocess_spec
    assert (spec(change) != spec({})) == counts


def test_tile_families_internvl_without_crops_is_another_model() -> None:
    spec = FAMILIES["internvl"].preprocess_spec
    assert spec({"crop_to_patches": True}) != spec({})
    assert spec({"max_patches": 6}) == spec({})
    assert spec({"crop_to_patches": True, "max_patches": 6}) != spec({"crop_to_patches": True})


def test_tile_families_internvl_spellings_of_sides_agree() -> None:
    spec = FAMILIES["internvl"].tower_spec
    assert spec({"vision_config": {"image_size": 448, "patch_size": 14}}) == spec({})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llava_next", "image_grid_pinpoints", [[336, 672]]),
        ("llava_onevision", "image_grid_pinpoints", [[384, 384]]),
        ("llava_onevision", "vision_aspect_ratio", "anyres_max_4"),
        ("llava_onevision", "projector_hidden_act", "relu"),
        ("internvl", "projector_hidden_act", "relu"),
        ("gemma3", "vision_config", {"layer_norm_eps": 1e-5}),
    ],
)
def test_tile_families_setting_of_rows_behind_the_tower_counts(name: str, field: str, value: Any) -> None:
    spec = FAMILIES[name].projector_spec
    assert spec({field: value}) != spec({})


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llava_next", {"vision_feature_select_strategy": "full"}),
        ("llava_onevision", {"vision_feature_select_strategy": "default"}),
        ("llava_next", {"vision_config": {"model_type": "pixtral"}}),
        ("llava_next", {"vision_feature_layer": 99}),
        ("internvl", {"vision_feature_layer": -2}),
        ("internvl", {"vision_feature_select_strategy": "full"}),
    ],
)
def test_tile_families_setting_engines_read_differently_is_refused(name: str, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        FAMILIES[name].tower_spec(config)


def test_tile_families_onevision_without_tile_limit_is_refused() -> None:
    with expect_error(CheckpointError, reason="bad_config", match="anyres_max_N"):
        FAMILIES["llava_onevision"].projector_spec({"vision_aspect_ratio": "pad"})
