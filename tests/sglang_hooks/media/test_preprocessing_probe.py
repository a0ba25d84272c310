from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.multimodal.processors.llava import LlavaImageProcessor
from transformers import AutoImageProcessor

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks.compat import validated_families
from cornplug.sglang_hooks.media import preprocessing
from cornplug.sglang_hooks.media.preprocessing import preprocessing_difference

QWEN: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2,
    "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 224 * 224,
}  # fmt: skip
CLIP: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
}


GEMMA: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 56, "width": 56},
    "do_pan_and_scan": True,
}
KINDS = {"Qwen2VLImageProcessor": "qwen2_vl", "CLIPImageProcessor": "llava", "Gemma3ImageProcessor": "gemma3"}


def model(folder: Path, preprocessor: dict[str, Any], **kwargs: Any) -> EngineModel:
    kind = KINDS[preprocessor["image_processor_type"]]
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype="float32",
        max_model_len=128,
        engine="sglang",
        validated_families=validated_families("float32"),
        processor_kwargs=kwargs,
    )


class Processor:
    """What `preprocessing_difference` sees of SGLang's BaseMultimodalProcessor."""

    mm_tokens = SimpleNamespace(image_token="<image>")

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._kwargs = kwargs
        self.noise = 0.0

    def process_mm_data(self, text: str, images: list[Any], processor: Any) -> dict[str, torch.Tensor]:
        assert text == "<image>"
        assert processor is not self._processor
        made = dict(processor(images=images, return_tensors="pt", **self._kwargs))
        made["pixel_values"] = made["pixel_values"] + self.noise
        return {"input_ids": torch.zeros(1, 3), **made}


def test_probes_are_equal_at_every_call() -> None:
    first, second = preprocessing.probe_images(), preprocessing.probe_images()
    assert [p.tobytes() for p in first] == [p.tobytes() for p in second]
    assert len({p.size for p in first}) == 3


@pytest.mark.parametrize("preprocessor", [QWEN, CLIP])
def test_preprocessing_difference_of_transformers_processor_is_none(
    tmp_path: Path, preprocessor: dict[str, Any]
) -> None:
    known = model(tmp_path, preprocessor)
    processor = Processor(tmp_path)
    assert preprocessing_difference(processor, known) is None
    processor.noise = 5e-6  # The last bits, as another device or another order of operations leaves them.
    assert preprocessing_difference(processor, known) is None
    processor.noise = 1e-3
    assert preprocessing_difference(processor, known) is not None


@pytest.mark.parametrize("preprocessor", [QWEN, CLIP])
def test_preprocessing_difference_of_pillow_backend_is_reported(
    tmp_path: Path, preprocessor: dict[str, Any]
) -> None:
    """`--image-processor-backend`: they resize differently, by up to 2 of 255 levels."""
    known = model(tmp_path, preprocessor)
    processor = Processor(tmp_path)
    processor._processor = AutoImageProcessor.from_pretrained(tmp_path, backend="torchvision")
    assert preprocessing_difference(processor, known) is None
    processor._processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert preprocessing_difference(processor, known) is not None


def test_preprocessing_difference_of_known_settings_is_none(tmp_path: Path) -> None:
    known = model(tmp_path, QWEN, max_pixels=112 * 112)
    same = Processor(tmp_path, max_pixels=112 * 112)
    assert preprocessing_difference(same, known) is None
    other = preprocessing_difference(Processor(tmp_path, max_pixels=140 * 140), known)
    again = preprocessing_difference(Processor(tmp_path, max_pixels=140 * 140), known)
    assert other is not None
    assert other == again
    assert other != preprocessing_difference(Processor(tmp_path), known)


def test_preprocessing_difference_of_class_defaults_is_none(tmp_path: Path) -> None:
    """Gemma 3's asks for no pan and scan, whatever the file says, in SGLang as in transformers."""
    known = model(tmp_path, GEMMA)
    asked = known.checkpoint.family.processor_defaults["image"]
    assert preprocessing_difference(Processor(tmp_path, **asked), known) is None
    crops = {**asked, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    assert preprocessing_difference(Processor(tmp_path, **crops), known) is not None
    assert preprocessing_difference(Processor(tmp_path, **crops), model(tmp_path, GEMMA, **crops)) is None


def test_preprocessing_difference_of_sglang_llava_is_reported(tmp_path: Path) -> None:
    known = model(tmp_path, CLIP)
    llava = LlavaImageProcessor.__new__(LlavaImageProcessor)
    llava.hf_config = SimpleNamespace()
    llava._processor = SimpleNamespace(image_processor=AutoImageProcessor.from_pretrained(tmp_path))
    found = preprocessing_difference(SimpleNamespace(inner=llava), known)
    assert found is not None
    assert found == preprocessing_difference(llava, known)


def test_preprocessing_difference_of_unknown_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot compare") as caught:
        preprocessing_difference(SimpleNamespace(_processor=None, mm_tokens=None), model(tmp_path, QWEN))
    assert caught.value.reason == "preprocessing"
