"""Media digests of a request's images, computed after SGLang's processors have decoded the images. Also
digests of tower inputs, for towers that only SGLang servers run.

    image ──decoded by SGLang──> processor ──> item      (tokenizer process)
                    └─ media digest ────────────┘

The digest covers the pixels that the processor receives, like the digests in `encoder_service.formats`.
SGLang 0.5.23 decodes some images differently: it does not apply the EXIF orientation, and it drops
transparency instead of putting the image on a white background. For these images, the pixels and digests
differ from vLLM's.

The digest is kept in a field of the item that is not sent to the scheduler. Later, when the salt is
available, the embedding key is computed from the digest (`mm_identifiers.py`). Some media have no digest and
are not shared: video, audio, tensors and embeddings that a client sends, and images for processors without a
hook.

Some of SGLang's towers compute other values than the encoder service, or belong to a family that the encoder
service does not support. SGLang servers with the same release, settings and checkpoint can still share the
embeddings of these towers. Their keys depend on the exact tensors that the tower receives:

    media ──SGLang's processor──> tensors of an item ──digest──> embedding key ──> store
                                                                     │
                   checkpoint, release, settings ──engine_only_identity┘

Therefore processor arguments need not be part of the key. The embeddings are shared, but the KV after such an
embedding is not (`placeholder_tokens.py`), because the positions and masks of its tokens depend on more than
the embedding.
"""

from __future__ import annotations

import asyncio
import functools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.engine_common.model_identity import EngineModel, TowerIdentity
from cornplug.identity import array_digest, digest, media_digest_with_options, pixels_digest
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, validated_families

_DIGEST: Final = "_cornplug_media"
_MAX_ARTIFACTS: Final = 16_384
"""Maximum number of entries in `_artifact_digests`. SGLang's own preprocessing cache cannot hold more."""

_CODE_PACKAGES: Final = ("sglang", "torch", "torchvision", "transformers")
"""Packages with the code of SGLang's towers."""
_KEY_SETTINGS: Final = (
    "attention_backend",
    "device",
    "mm_attention_backend",
    "prefill_attention_backend",
    "tp_size",
)
_MODALITIES: Final = ("image", "video", "audio")
FIELD_PREFIX: Final = "cornplug_"
"""Prefix of fields that this plugin adds to an item."""

_lock = threading.Lock()
_artifact_digests: OrderedDict[str, bytes | None] = OrderedDict()
"""Media digest by SGLang's key of a preprocessed image (content and settings)."""
_llava_digests: ContextVar[dict[int, bytes | None] | None] = ContextVar("cornplug_llava", default=None)
"""Digests of the current request's images, by id of the image_data element."""

_BASE: Final = "sglang.srt.multimodal.processors"


def set_digest(item: Any, media: bytes | Callable[[], bytes | None] | None) -> None:
    """Set an item's media digest: 32 bytes, or a function that computes them. None clears the digest."""
    item.__dict__[_DIGEST] = media


def digest_of(item: Any) -> bytes | None:
    """Return the media digest of an item, or None if it has no digest."""
    found: Any = item.__dict__.get(_DIGEST)
    if callable(found):
        found = item.__dict__[_DIGEST] = found()
    media: bytes | None = found
    return media


async def compute_digests(items: Sequence[Any], tower_modalities: frozenset[str] = frozenset()) -> None:
    """Compute the digests of items in a thread.

    For the modalities `tower_modalities`, the digest covers the inputs of the tower. The digest of a large
    image takes 0.1 s. On the event loop, this would delay every response of the server.
    """
    for item in items:
        if item.modality.name.lower() in tower_modalities:
            set_digest(item, functools.partial(inputs_digest, item))
    if any(callable(item.__dict__.get(_DIGEST)) for item in items):
        await asyncio.to_thread(lambda: [digest_of(item) for item in items])


def image_digest(image: object, *, converts: bool = True) -> bytes | None:
    """Return the media digest (32 bytes) of a decoded image, or None for other objects.

    `converts` is True if the processor converts images of all modes to RGB with Pillow's `convert`.
    """
    if isinstance(image, Image.Image):
        if image.mode != "RGB":
            if not converts:
                return None
            image = image.convert("RGB")
        return pixels_digest("RGB", image.width, image.height, image.tobytes())
    if isinstance(image, torch.Tensor) and image.dtype == torch.uint8:
        # The GPU has decoded the image, so its pixels differ from Pillow's.
        array = image.detach().cpu().contiguous().numpy()
        return array_digest("uint8", array.shape, array.tobytes())
    return None


def converts_to_rgb(processor: Any) -> bool:
    """Return whether a Hugging Face processor converts images to RGB."""
    return bool(getattr(getattr(processor, "image_processor", None), "do_convert_rgb", False))


@dataclass(frozen=True, slots=True)
class OwnTower:
    """Tower whose embeddings only SGLang servers share."""

    tower: TowerIdentity
    modalities: frozenset[str] = field(default_factory=frozenset)
    """Tested modalities: "image", "video", "audio"."""


def own_modalities(model_type: str, dtype: str) -> frozenset[str]:
    """Return the modalities for which SGLang servers share embeddings of this family in this dtype."""
    return frozenset(m for m in _MODALITIES if model_type in validated_families(dtype, f"own {m}"))


def own_tower(model: EngineModel, settings: Any, *, generic: bool) -> OwnTower | None:
    """Return the identity of a model's tower for sharing among SGLang servers, or None if the tower is not
    tested.

    Reads all weights, whose digests are cached on disk.

    Args:
        settings: SGLang's resolved settings.
        generic: whether SGLang runs the model with its generic backend. If so, the result is None, because
            `MultiModalMixin._forward_hidden_states` does not call one of SGLang's towers.

    Raises the same errors as `EngineModel.engine_only_identity`.
    """
    modalities = own_modalities(str(model.checkpoint.config.get("model_type")), model.dtype)
    if not modalities or generic:
        return None
    code = {package: version(package) for package in _CODE_PACKAGES}
    chosen = {name: getattr(settings, name) for name in _KEY_SETTINGS}
    return OwnTower(model.engine_only_identity({"code": code, "settings": chosen}), modalities)


def inputs_digest(item: Any) -> bytes | None:
    """Return the digest (32 bytes) of everything that an item passes to its tower.

    Returns None if the item has no features of its own, or if a field has an unsupported type. Supported
    types are tensors, numbers, text and collections of these types, but not, for example, a handle to another
    process's GPU memory.
    """
    from sglang.srt.managers.schedule_batch import MultimodalInputFormat

    if item.format != MultimodalInputFormat.NORMAL or item.feature is None:
        return None
    named = {k: v for k, v in item.model_specific_data.items() if not k.startswith(FIELD_PREFIX)}
    try:
        return digest(
            "cornplug-sglang-inputs-v1", item.modality.name.encode(), _digest(item.feature), _digest(named)
        )
    except TypeError:
        return None


def _digest(value: object) -> bytes:
    """Return a digest that distinguishes values of all types. Raises TypeError for unsupported types."""
    match value:
        case torch.Tensor():
            if value.layout != torch.strided or value.is_quantized:
                raise TypeError(f"unsupported tensor layout {value.layout}")
            return digest("tensor", array_digest(dtype_name(value.dtype), value.shape, raw_bytes(value)))
        case np.ndarray():
            if value.dtype.kind not in "biuf":
                raise TypeError(f"unsupported array dtype {value.dtype}")
            data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
            return digest("array", array_digest(value.dtype.name, value.shape, data.tobytes()))
        case None | bool():
            return digest("constant", str(value).encode())
        case int():
            return digest("int", str(value).encode())
        case float():
            return digest("float", struct.pack(">d", value))
        case str():
            return digest("text", value.encode("utf-8", errors="surrogatepass"))
        case bytes():
            return digest("bytes", value)
        case list() | tuple():
            return digest("list", *map(_digest, value))
        case Mapping():
            # Sort by digest, because keys of different types cannot be sorted.
            return digest("mapping", *sorted(_digest(k) + _digest(v) for k, v in value.items()))
    raise TypeError(f"a {type(value).__name__}")


# -- most processors: images in, items out -------------------------------------------------


def _finalize_mm_items(
    original: Callable[..., list[Any]], this: Any, mm_items: list[Any], *, images: Sequence[Any] | None
) -> list[Any]:
    items = original(this, mm_items, images=images)
    if activation.is_on() and images:
        image_items = [item for item in items if item.is_image()]
        # Items cannot be matched with images if an item has several images or if a client sent tensors.
        if len(image_items) == len(images) and not any(isinstance(image, Mapping) for image in images):
            converts = converts_to_rgb(this._processor)
            for item, image in zip(image_items, images, strict=True):
                # This may run on the event loop. `compute_digests` computes the digest in a thread.
                set_digest(item, functools.partial(image_digest, image, converts=converts))
    return items


# -- processors that keep preprocessed images (Qwen3-VL, or with --mm-preprocess-cache-size-mb) --


async def _wrap_build_artifacts(original: Callable[..., Any], this: Any, entries: Sequence[Any]) -> list[Any]:
    made: list[Any] = await original(this, entries)
    if activation.is_on():
        converts = converts_to_rgb(this._processor)
        media = [entry.media for entry in entries]
        digests = await asyncio.to_thread(lambda: [image_digest(image, converts=converts) for image in media])
        with _lock:
            for artifact, found in zip(made, digests, strict=True):
                _artifact_digests[artifact.artifact_key] = found
                _artifact_digests.move_to_end(artifact.artifact_key)
            while len(_artifact_digests) > _MAX_ARTIFACTS:
                _artifact_digests.popitem(last=False)
    return made


def _on_artifacts_composed(result: Any, this: Any, input_text: Any, artifacts: Sequence[Any]) -> None:
    if activation.is_on() and result is not None and len(result.mm_items) == len(artifacts):
        for item, artifact in zip(result.mm_items, artifacts, strict=True):
            with _lock:
                media = _artifact_digests.get(artifact.artifact_key)
            set_digest(item, media)


# -- LLaVA: decodes in its own processes, and hashes URLs -------------------------------------


def _wrap_llava_task(
    original: Callable[..., Any], image_input: Any, image_hash: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return an image's digest instead of its hash, which no caller needs. Runs in a worker process."""
    pixels, _, size = original(image_input, image_hash, *args, **kwargs)
    if not activation.is_on():
        return pixels, image_hash, size
    from sglang.srt.utils import load_image

    image, frames = load_image(image_input, False)
    # SGLang pads or resizes an image before converting it to RGB, so images in other modes get no digest.
    media = None if frames is not None else image_digest(image, converts=False)
    return pixels, media, size


async def _wrap_llava_image(
    original: Callable[..., Any], this: Any, image_data: Any, aspect_ratio: Any, grid_pinpoints: Any
) -> Any:
    result = await original(this, image_data, aspect_ratio, grid_pinpoints)
    found = _llava_digests.get()
    if found is not None and isinstance(media := result[1], bytes):
        usual = getattr(this.hf_config, "image_aspect_ratio", None)
        options = {} if aspect_ratio == usual else {"sglang": {"aspect_ratio": aspect_ratio}}
        found[id(image_data)] = media_digest_with_options(media, options)
    return result


async def _wrap_llava_request(
    original: Callable[..., Any], this: Any, image_data: Any, *args: Any, **kwargs: Any
) -> Any:
    if not activation.is_on():
        return await original(this, image_data, *args, **kwargs)
    found: dict[int, bytes | None] = {}
    token = _llava_digests.set(found)
    try:
        output = await original(this, image_data, *args, **kwargs)
    finally:
        _llava_digests.reset(token)
    # There is one item per image that SGLang uses, in order. For some requests, SGLang uses only the first
    # image.
    for source, item in zip(image_data, output.mm_items, strict=False):
        if item.is_image():
            set_digest(item, found.get(id(source)))
    return output


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_BASE}.base_processor.BaseMultimodalProcessor._finalize_mm_items", "around", _finalize_mm_items),
    Hook(
        "sglang.srt.multimodal.media_artifacts.base.MediaArtifactCacheMixin"
        "._run_preprocess_and_build_artifact_batch",
        "around",
        _wrap_build_artifacts,
    ),
    Hook(f"{_BASE}.qwen_vl.QwenVLImageProcessor.compose_image_artifacts", "after", _on_artifacts_composed),
)
LLAVA_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_BASE}.llava.LlavaImageProcessor._preprocess_image_task", "around", _wrap_llava_task),
    Hook(f"{_BASE}.llava.LlavaImageProcessor._process_single_image", "around", _wrap_llava_image),
    Hook(f"{_BASE}.llava.LlavaImageProcessor.process_mm_data_async", "around", _wrap_llava_request),
)
