"""Payload of a medium that a client sends, created from a path, the bytes of a file, or a PIL image."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from PIL import Image

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.errors import CornplugError, MediaError
from cornplug.identity import pixels_digest

Medium = str | os.PathLike[Any] | bytes | Image.Image
"""A path, the bytes of a file, or a PIL image."""
Item = Medium | Mapping[Modality, Medium]
"""An image, or {"image" | "video" | "audio": medium}."""
Result = tuple[int, EmbeddingRef | CornplugError]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPayload:
    """One medium, ready to be sent as a file."""

    modality: Modality
    name: str
    data: bytes = field(repr=False)
    content: bytes
    """Digest by which services are ranked, which is not sent. It is the SHA-256 of the bytes, or the digest
    of a PIL image's pixels, because a PNG's bytes depend on the encoder."""

    @classmethod
    def of(cls, item: Item) -> Self:
        """Create the payload for an item. Reads a path, and encodes a PIL image as PNG without loss.

        Raises MediaError: "not_found" if a path cannot be read; "unprocessable" if a PIL image is damaged,
        has a mode that PNG lacks, or is passed as video or audio; "bad_input" if the item has another type
        or does not have exactly one medium.
        """
        modality: Modality
        medium: Medium
        if not isinstance(item, Mapping):
            modality, medium = "image", item
        else:
            if len(item) != 1:
                raise MediaError(
                    f'an item needs one of "image", "video" and "audio", not {list(item) or "none"}',
                    reason="bad_input",
                )
            ((modality, medium),) = item.items()
        if isinstance(medium, Image.Image):
            return cls._packed(modality, medium)
        if isinstance(medium, bytes):
            name, data = str(modality), medium
        elif isinstance(medium, str | os.PathLike):
            try:
                path = Path(os.fsdecode(medium))
                name, data = path.name, path.read_bytes()
            except (OSError, ValueError) as e:  # ValueError for a null byte in the path
                problem = (isinstance(e, OSError) and e.strerror) or e
                raise MediaError(f"cannot read {medium!r}: {problem}", reason="not_found") from e
        else:
            raise MediaError(
                f"a medium is a path, bytes or a PIL image, not {type(medium).__name__}", reason="bad_input"
            )
        return cls(modality=modality, name=name, data=data, content=hashlib.sha256(data).digest())

    @classmethod
    def _packed(cls, modality: Modality, image: Image.Image) -> Self:
        if modality != "image":
            raise MediaError(f"{modality}: send a path or the bytes of a file", reason="unprocessable")
        out = io.BytesIO()
        try:
            image.save(out, "PNG", compress_level=1)
            content = pixels_digest(image.mode, image.width, image.height, image.tobytes())
        except MemoryError:
            raise
        except Exception as e:
            raise MediaError(
                f"cannot encode the image as PNG; convert it to RGB first: {e}", reason="unprocessable"
            ) from e
        return cls(modality=modality, name="image.png", data=out.getvalue(), content=content)
