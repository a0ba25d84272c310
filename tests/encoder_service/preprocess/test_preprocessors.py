"""Images as bytes become the inputs that a model's whole processor, as engines call it, makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from cornplug.encoder_service.formats.messages import DEFAULT_DECODING
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.prepared_media import ImagePreprocessor
from cornplug.encoder_service.preprocess.preprocessor import IN_PROCESS_CONTEXT, FrameSampling, MediaLimits
from devkit import checkpoints

from ..conftest import png, sample_image
from ..tower_rig import F32, Halves, rows, whole_model

RECIPES: dict[str, tuple[Callable[..., Path], str]] = {
    "llava": (checkpoints.llava, "<image>"),
    "llava_next": (checkpoints.llava_next, "<image>"),
    "llava_onevision": (checkpoints.llava_onevision, "<image>"),
    "gemma3": (checkpoints.gemma3, "<start_of_image>"),
    "internvl": (checkpoints.internvl, "<IMG_CONTEXT>"),
    "qwen2_vl": (checkpoints.qwen2_vl, "<|image_pad|>"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_preprocessors_inputs_equal_whole_processor(name: str, tmp_path: Path) -> None:
    """Its class may ask the image processor for more than the image processor's own file says."""
    recipe, token = RECIPES[name]
    path = recipe(tmp_path / "m")
    (loaded,) = ModelRegistry.open([str(path)], dtype="float32", device="cpu").loaded_models()
    preprocessor = ImagePreprocessor(loaded, MediaLimits())
    whole: Any = AutoProcessor.from_pretrained(path)
    for seed, size in enumerate([(70, 60), (200, 90)]):
        image = sample_image(seed, *size)
        wanted = whole(images=[image], text=[token], return_tensors="pt")
        decoded = preprocessor.decode(
            [png(image)], "file", FrameSampling(), DEFAULT_DECODING, IN_PROCESS_CONTEXT
        )
        found = decoded.preprocess()
        grid = dict(preprocessor.shape_inputs(decoded.shape) or {})
        for field in loaded.checkpoint.family.inputs["image"]:
            assert torch.equal(found[field], wanted[field])
            if field.endswith("_grid_thw"):
                assert torch.equal(grid.pop(field), wanted[field])
        assert not grid


def test_preprocessors_image_of_several_crops_is_one_item(tmp_path: Path) -> None:
    """Gemma 3 with pan and scan, as a deployment may ask for: the whole image's rows, then each crop's."""
    path = checkpoints.gemma3(tmp_path / "m")
    whole: Any = AutoProcessor.from_pretrained(path)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    made = whole.image_processor(
        images=sample_image(0, 200, 60),
        return_tensors="pt",
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
        **crops,
    )
    pixels = made["pixel_values"]
    assert len(pixels) > 2
    halves = Halves.load(path, F32)
    (item,) = halves.items([{"pixel_values": pixels}])
    ours = halves.projector.project(halves.tower.encode([item]), [item])[0]
    with torch.inference_mode():
        theirs = rows(whole_model(path).get_image_features(pixel_values=pixels))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
