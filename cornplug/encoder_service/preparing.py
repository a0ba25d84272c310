"""From a medium's bytes to a request of the encoder: decode, digest, preprocess, name the key."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from PIL import Image
from transformers import AutoImageProcessor

from cornplug import identity
from cornplug.encoder_service import media
from cornplug.encoder_service.protocol import Encode, Tensor
from cornplug.encoder_service.registry import Loaded, Registry
from cornplug.encoder_service.towers.tensors import dtype_name, raw_bytes
from cornplug.errors import CheckpointError, EncoderRefused, MediaError
from cornplug.families import Modality

APP: Final = "http"
"""In whose name pictures that came by HTTP are stored."""
SGLANG: Final = "sglang"
"""And those of SGLang's servers, by its own protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    request: Encode
    dtype: str
    """Of the embedding, as torch names it."""
    media: bytes
    """The media digest."""


class Preparer:
    """Thread-safe. Processors are transformers' own, loaded at once, without any code of the checkpoint.

    Raises CheckpointError("bad_config") where a checkpoint has no processor that loads.
    """

    def __init__(self, registry: Registry, *, secret: bytes, max_pixels: int) -> None:
        self._registry = registry
        self._secret = secret
        self._max_pixels = max_pixels
        self._processors = {loaded.served.name: _processor(loaded) for loaded in registry.loaded()}

    def prepare(
        self, model: str, modality: Modality, data: bytes, *, salt: str | None, deadline_s: float
    ) -> Prepared:
        """A request for the medium in `data`, as this model's engine would make it.

        Raises EncoderRefused("unknown_model", or "modality" that the model does not take),
        MediaError as `media.decode`, and MediaError("unprocessable") where the model's
        processor takes no such medium.
        """
        taken = self._loaded(model).checkpoint.family.inputs
        if modality not in taken:
            raise EncoderRefused(f"{modality}: {model} takes {', '.join(taken)} only", reason="modality")
        image = media.as_received(media.decode(data, self._max_pixels))
        return self._prepare(model, image, salt, deadline_s, APP)

    def prepare_for_sglang(self, model: str, data: bytes, *, salt: str | None, deadline_s: float) -> Prepared:
        """The same as an SGLang server of this model would make it. Raises as `prepare`."""
        image = media.as_sglang_receives(data, self._max_pixels)
        return self._prepare(model, image, salt, deadline_s, SGLANG)

    def _prepare(
        self, model: str, image: Image.Image, salt: str | None, deadline_s: float, app: str
    ) -> Prepared:
        loaded = self._loaded(model)
        digest = media.digest_rgb(image)
        key = identity.embedding_key(self._secret, loaded.served.identity, digest, salt)
        try:
            made: Mapping[str, torch.Tensor] = self._processors[model](images=image, return_tensors="pt")
        except ValueError as e:
            # Processors refuse shapes of theirs so, e.g. an aspect ratio of over 200 to 1.
            raise MediaError(
                f"the model's processor refuses this picture: {e}", reason="unprocessable"
            ) from e
        request = Encode(
            id=0,
            identity=loaded.served.identity,
            key=key,
            salt=salt,
            inputs={name: _to_wire(tensor) for name, tensor in made.items()},
            app=app,
            deadline_s=deadline_s,
        )
        return Prepared(request=request, dtype=loaded.served.dtype, media=digest)

    def _loaded(self, model: str) -> Loaded:
        loaded = self._registry.by_name(model)
        if loaded is None:
            served = ", ".join(self._processors)
            raise EncoderRefused(f"model: {model!r} is not served; served: {served}", reason="unknown_model")
        return loaded


def medium_bytes(field: str, text: str) -> bytes:
    """A medium out of a JSON text: base64, or a data URL with base64. Nothing is fetched.

    Raises EncoderRefused("bad_input") or ("remote_url").
    """
    if text.startswith("data:"):
        header, _, text = text.partition(",")
        if not header.endswith(";base64"):
            raise EncoderRefused(f"{field}: a data URL must be base64", reason="bad_input")
    elif "://" in text[:32]:
        raise EncoderRefused(f"{field}: remote URLs are not fetched; send the bytes", reason="remote_url")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise EncoderRefused(f"{field}: not base64: {e}", reason="bad_input") from None


def _processor(loaded: Loaded) -> Any:
    path = loaded.checkpoint.path
    try:
        return AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as e:
        raise CheckpointError(f"{path}: no image processor: {e}", reason="bad_config") from e


def _to_wire(tensor: torch.Tensor) -> Tensor:
    return Tensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=bytes(raw_bytes(tensor)))
