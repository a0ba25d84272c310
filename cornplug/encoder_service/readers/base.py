"""The seam of every modality: bytes -> digest and tower inputs, as the model's engine would make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from cornplug.config import EncoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a medium may be at most, after decoding."""

    max_pixels: int = 64_000_000
    max_audio_s: float = 600.0

    @classmethod
    def of(cls, config: EncoderConfig) -> Limits:
        return cls(max_pixels=config.max_pixels, max_audio_s=config.max_audio_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One medium, read."""

    digest: bytes
    """The media digest, 32 bytes."""
    inputs: Mapping[str, torch.Tensor]
    """What the tower takes, by the processor's names."""


class Reader(Protocol):
    """Of one model and modality. Thread-safe, and runs no code of a checkpoint."""

    def read(self, data: bytes) -> Reading:
        """Raises MediaError: as the modality's `decode`, and "unprocessable" where the model's
        processor takes no such medium."""
