"""What the encoder-cache connector's two halves tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class ArrivedEmbedding:
    """A verified embedding, carried whole: what the scheduler half promised cannot be lost
    between it and the worker, whatever dies in between."""

    identifier: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


@dataclass(slots=True)
class ECMoves(ECConnectorMetadata):
    """Scheduler half -> worker halves, one step."""

    arrived: list[ArrivedEmbedding] = field(default_factory=list)
    publish: bool = True
    """Whether embeddings computed here may be offered to others."""


@dataclass(slots=True)
class ECAcks(ECConnectorWorkerMetadata):
    """Worker half -> scheduler half."""

    saves: list[tuple[str, int]] = field(default_factory=list)
    """(outcome, payload bytes) of embeddings offered."""
    encoded: list[tuple[int, float]] = field(default_factory=list)
    """(rows, seconds) of what the tower did in a step."""
    copied: list[tuple[int, float]] = field(default_factory=list)
    """(bytes, seconds) of embeddings put into the engine's cache."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, ECAcks)
        self.saves += other.saves
        self.encoded += other.encoded
        self.copied += other.copied
        return self
