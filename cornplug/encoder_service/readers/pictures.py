"""Pictures: Pillow, vLLM's rule (`media`), and the checkpoint's image processor."""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import AutoImageProcessor

from cornplug.encoder_service import media
from cornplug.encoder_service.readers.base import Limits, Reading, Sampling
from cornplug.encoder_service.registry import Loaded
from cornplug.errors import CheckpointError, MediaError


class Pictures:
    """Reads pictures for one model. Raises CheckpointError("bad_config") without an image processor."""

    def __init__(self, loaded: Loaded, limits: Limits) -> None:
        path = loaded.checkpoint.path
        self._max_pixels = limits.max_pixels
        self._asked = loaded.checkpoint.family.processor_defaults.get("image", {})
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as e:
            raise CheckpointError(f"{path}: no image processor: {e}", reason="bad_config") from e

    def read(self, data: bytes, sampling: Sampling) -> Reading:
        return self._reading(media.as_received(media.decode(data, self._max_pixels)))

    def read_for_sglang(self, data: bytes) -> Reading:
        """The same as an SGLang server would make it."""
        return self._reading(media.as_sglang_receives(data, self._max_pixels))

    def _reading(self, image: Image.Image) -> Reading:
        try:
            made = self._processor(images=image, return_tensors="pt", **self._asked)
        except ValueError as e:
            # Processors refuse shapes of theirs so, e.g. an aspect ratio of over 200 to 1.
            raise MediaError(
                f"the model's processor refuses this picture: {e}", reason="unprocessable"
            ) from e
        return Reading(digest=media.digest_rgb(image), inputs=dict(made))
