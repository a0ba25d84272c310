"""Messages between the encoder-cache connector's two halves."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from cornplug.vllm_connector.ec.row_memory import RowPlace


@dataclass(frozen=True, slots=True)
class ArrivedEmbedding:
    """A verified embedding with its bytes. An embedding that the scheduler half has promised reaches the
    worker even if the store and the service die in between."""

    identifier: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray | RowPlace
    """The rows, or their place in the memory that scheduler and workers map."""


@dataclass(slots=True)
class CornplugECMetadata(ECConnectorMetadata):
    """Message from the scheduler half to the worker halves for one step."""

    arrived: list[ArrivedEmbedding] = field(default_factory=list)
    publish: bool = True
    """Whether embeddings computed in this step may be saved."""
    again: list[str] = field(default_factory=list)
    """Identifiers in the engine's own cache that the store lacks, to be saved again."""
    epoch: int = 0
    """Epoch of the weights that compute this step (`engine_common.weights_guard`)."""
    row_memory: str = ""
    """Address of the memory of `RowPlace`s, until every rank has mapped it."""


@dataclass(slots=True)
class CornplugECWorkerMetadata(ECConnectorWorkerMetadata):
    """Message from a worker half to the scheduler half."""

    saves: list[tuple[str, int]] = field(default_factory=list)
    """(outcome, payload bytes) of saved embeddings."""
    encoded: list[tuple[int, float]] = field(default_factory=list)
    """(rows, seconds) of each step of the tower."""
    copied: list[tuple[int, float]] = field(default_factory=list)
    """(bytes, seconds) of embeddings copied into the engine's cache."""
    mapped: list[int] = field(default_factory=list)
    """Ranks that have mapped the scheduler's row memory."""
    copied_rows: list[tuple[int, int]] = field(default_factory=list)
    """(rank, offset) of places that the rank has copied."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, CornplugECWorkerMetadata)
        self.saves += other.saves
        self.encoded += other.encoded
        self.copied += other.copied
        self.mapped += other.mapped
        self.copied_rows += other.copied_rows
        return self
