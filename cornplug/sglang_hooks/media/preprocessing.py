"""Compares SGLang's image preprocessing with transformers, which vLLM and the encoder service use.

An embedding's key contains the preprocessor's settings, on the assumption that they have the same effect as
in transformers. However, SGLang has its own processors for some families (LLaVA's processor rounds pixels to
float16), may preprocess on the GPU, and adds settings. Therefore `preprocessing_difference` runs both on
synthetic images. If the pixels differ by more than float32 rounding, the preprocessing becomes part of the
identity.

On CUDA, SGLang decodes JPEGs with nvJPEG and resizes in float32. The pixels then differ from the pixels that
Pillow and torchvision compute on a CPU. With SGLang's default, a server therefore shares embeddings of images
only with similar servers. The tower runs once for these servers and once for all other engines. With `HOOKS`,
a GPU server decodes and resizes images on the CPU. On a GB300, SGLang's authors measured 9.3 full-page images
per second with preprocessing on the GPU and one worker, and 8.8 with preprocessing on the CPU and two workers
(`BaseMultimodalProcessor._resolve_auto_mm_processor_worker_num`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from cornplug.checkpoints.families import FAMILIES
from cornplug.config import Config, EncoderConfig
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from cornplug.identity import array_digest, digest
from cornplug.sglang_hooks.compat import Hook, logger, validated_families

_CONNECT_TIMEOUT_S: Final = 0.5

_BASE: Final = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
_SIZES: Final = ((97, 61), (342, 255), (640, 427))
"""(width, height) of the synthetic images: odd sizes, smaller and larger than the input of most towers."""
_ROUNDING: Final = 1e-5
"""Maximum difference of normalised pixels that counts as rounding. One of 255 levels is about 1e-2."""
# A processor of another family may raise any of these exceptions. It is then not compared.
_PROCESSOR_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
Tensors = Mapping[str, torch.Tensor]


def preprocesses_on_cpu(config: Config, *, device: str, family: str, dtype: str) -> bool:
    """Return whether a server on `device` preprocesses images of `family` on its CPU. Log the decision."""
    # ROCm's device is also named "cuda". On all other devices, SGLang decides.
    if device != "cuda" or not config.engine.share_embeddings or family not in validated_families(dtype):
        return False
    how = config.engine.sglang_preprocessing
    if how == "auto":
        how = "cpu" if _is_encoder_listening(config.encoder) else "device"
    if how == "cpu":
        logger.info(
            "cornplug: this server decodes and resizes images on the CPU, like vLLM and the encoder service, "
            'so their embeddings are shared. Set engine.sglang_preprocessing = "device" to use the GPU'
        )
    else:
        logger.warning(
            "cornplug: the GPU decodes and resizes images. The pixels differ from vLLM's and the "
            "encoder service's pixels, so this server does not share embeddings with them. Set "
            'engine.sglang_preprocessing = "cpu" to share embeddings'
        )
    return how == "cpu"


def _is_encoder_listening(config: EncoderConfig) -> bool:
    """Return whether an encoder service listens at an address that the engine uses for embeddings."""
    for url in config.engine_urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((parts.hostname or "", port), _CONNECT_TIMEOUT_S),
        ):
            return True
    if config.engine_urls:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(config.socket))
        except OSError:
            return False
    return True


def _force_cpu_device(original: Callable[..., Any], this: Any, processor: Any) -> str:
    return "cpu"


def _never_competes(original: Callable[..., Any], this: Any) -> bool:
    """Return False, so that SGLang uses two workers, as for preprocessing on a CPU."""
    return False


def _disable_gpu_decode(this: Any, *_args: Any, **_kwargs: Any) -> None:
    # SGLang reads the attribute from the class, so set it there. A process serves only one model.
    type(this).gpu_image_decode = False


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_BASE}.__init__", "before", _disable_gpu_decode),
    Hook(f"{_BASE}._fast_image_processor_device", "around", _force_cpu_device),
    Hook(f"{_BASE}._preprocessing_competes_with_the_scheduler", "around", _never_competes),
)


def probe_images() -> list[Image.Image]:
    """Return synthetic images with smooth and sharp parts, which are the same in every process."""
    made = []
    for width, height in _SIZES:
        y, x = np.mgrid[0:height, 0:width].astype(np.int64)
        planes = (x * 255 // width, (x * y) % 251, ((x // 7 + y // 5) % 2) * 255)
        made.append(Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8), "RGB"))
    return made


def preprocessing_difference(processor: Any, model: EngineModel) -> str | None:
    """Compare SGLang's `processor` with transformers. Return None if both compute the same pixels.

    `processor` is a BaseMultimodalProcessor. If the pixels differ, the result is the hex digest of the
    tensors that `processor` computes from `probe_images`. This takes tens of milliseconds, too long for an
    event loop. Raises CheckpointError("preprocessing") if the processor cannot be called.
    """
    processor = getattr(processor, "inner", processor)
    try:
        names = _tensor_names(model)
        ours = [_sglang_tensors(processor, image, names) for image in probe_images()]
        theirs = _reference_tensors(model, ours)
    except _PROCESSOR_ERRORS as e:
        raise CheckpointError(
            f"cannot compare {type(processor).__name__} with transformers: {type(e).__name__}: {e}",
            reason="preprocessing",
        ) from e
    if all(map(_tensors_match, ours, theirs)):
        return None
    parts = [
        digest("tensor", name.encode(), array_digest(dtype_name(value.dtype), value.shape, raw_bytes(value)))
        for tensors in ours
        for name, value in sorted(tensors.items())
    ]
    return digest("cornplug-preprocessing-v1", *parts).hex()


def _tensor_names(model: EngineModel) -> Sequence[str]:
    """Return the names of the tensors that a tower of this model's family receives for an image."""
    name = str(model.checkpoint.config.get("model_type"))
    family = FAMILIES.get(name)
    described = family.inputs.get("image") if family else None
    return described or model.generic_inputs.get(name) or ("pixel_values", "image_grid_thw")


def _sglang_tensors(processor: Any, image: Image.Image, names: Sequence[str]) -> Tensors:
    """Return the tensors that SGLang sends to its tower for one image, by name."""
    from sglang.srt.multimodal.media_artifacts import MediaArtifactCacheMixin
    from sglang.srt.multimodal.processors.llava import LlavaImageProcessor

    if isinstance(processor, LlavaImageProcessor):
        return _llava_tensors(processor, image)
    found = _call_processor(processor, image, names)
    if isinstance(processor, MediaArtifactCacheMixin) and _keeps_artifacts(processor):
        artifact = _artifact_tensors(processor, image)
        if not _tensors_match(artifact, found):
            # The processor may handle a request in either way, and a key cannot distinguish the two ways.
            raise ValueError("the processor processes the same image in two ways")
    return found


def _call_processor(processor: Any, image: Image.Image, names: Sequence[str]) -> Tensors:
    # Use a clone, because other threads use the processor at the same time.
    clone = copy.deepcopy(processor._processor)
    made = processor.process_mm_data(processor.mm_tokens.image_token, images=[image], processor=clone)
    return {name: made[name].cpu() for name in names if name in made}


def _keeps_artifacts(processor: Any) -> bool:
    return processor.mm_preprocess_cache.enabled or processor.uses_media_artifacts_without_cache


def _artifact_tensors(processor: Any, image: Image.Image) -> Tensors:
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.multimodal.media_artifacts import MediaArtifactInput

    name = "sha256:" + "0" * 64
    entry = MediaArtifactInput(name, name, Modality.IMAGE, image)
    (made,) = processor.prepare_artifact_batch([entry], processor=copy.deepcopy(processor._processor))
    values = {"pixel_values": made.feature, **made.model_specific_data}
    return {name: value.cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _llava_tensors(processor: Any, image: Image.Image) -> Tensors:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    usual = getattr(processor.hf_config, "image_aspect_ratio", None)
    grid = getattr(processor.hf_config, "image_grid_pinpoints", None) if "anyres" in (usual or "") else None
    pixels, _, _ = processor._preprocess_image_task(
        encoded.getvalue(), None, usual, grid, copy.deepcopy(processor._processor)
    )
    return {"pixel_values": torch.as_tensor(np.asarray(pixels))}


def _reference_tensors(model: EngineModel, ours: Sequence[Tensors]) -> list[Tensors]:
    """Return the tensors that transformers computes from each probe, by name. vLLM and the encoder service
    use the same code."""
    from transformers import AutoImageProcessor

    image_processor = AutoImageProcessor.from_pretrained(
        model.checkpoint.path, local_files_only=True, trust_remote_code=False
    )
    family = FAMILIES.get(str(model.checkpoint.config.get("model_type")))
    asked = {**(family.processor_defaults.get("image", {}) if family else {}), **model.processor_kwargs}
    made: list[Tensors] = []
    for image, found in zip(probe_images(), ours, strict=True):
        values = image_processor(images=image, return_tensors="pt", **asked)
        made.append({name: values[name] for name in found if name in values})
    return made


def _tensors_match(a: Tensors, b: Tensors) -> bool:
    if a.keys() != b.keys() or not a:
        return False
    return all(_tensor_matches(_drop_batch_dim(a[name]), _drop_batch_dim(b[name])) for name in a)


def _tensor_matches(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.float(), b.float(), rtol=0, atol=_ROUNDING)


def _drop_batch_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Remove a batch dimension of one, which some processors add."""
    return tensor.squeeze(0) if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor
