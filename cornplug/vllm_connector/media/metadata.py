"""Messages between the encoder-cache connector's scheduler half and worker halves.

    scheduler ──lease of the rows, in a step's metadata──> each worker ──copies and verifies──> encoder cache
        ^──────────── copied, or lost with a reason ──────────────┘

vLLM pickles the metadata of a step for each worker process. A lease takes 300 bytes, whatever the size of
the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from cornplug.store.base import PayloadLocation


class LeasedRows(NamedTuple):
    """Rows of an embedding in the store's memory, which the scheduler half has leased."""

    token: int
    """Token of the lease."""
    location: PayloadLocation
    checksums: tuple[int, ...]
    """Checksum of each segment of the rows, from the entry's header."""


@dataclass(frozen=True, slots=True)
class ArrivedEmbedding:
    """Embedding that the scheduler half has leased or received, for the workers' encoder cache."""

    identifier: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | LeasedRows
    """Bytes of the rows, or the lease of the rows. The workers copy leased rows."""
    request_id: str = ""
    """Request for which the engine reserved memory in its encoder cache."""
    input_id: int = 0
    """Index of the media item in this request. If a worker cannot load the rows, the tower encodes this
    item."""


@dataclass(slots=True)
class CornplugECMetadata(ECConnectorMetadata):
    """Message from the scheduler half to the worker halves of the encoder-cache connector for one step."""

    arrived: list[ArrivedEmbedding] = field(default_factory=list)
    publish: bool = True
    """Whether embeddings computed in this step may be saved."""
    save_again: list[str] = field(default_factory=list)
    """Identifiers of embeddings that are in the engine's own cache but not in the store. They are saved
    again."""
    epoch: int = 0
    """Epoch of the weights in this step, a counter of weight updates (`engine_common.weights_guard`)."""


@dataclass(slots=True)
class CornplugECWorkerMetadata(ECConnectorWorkerMetadata):
    """Message from a worker half to the scheduler half of the encoder-cache connector."""

    saves: list[tuple[str, int]] = field(default_factory=list)
    """(outcome, number of payload bytes) for each finished save of an embedding."""
    encode_times: list[tuple[int, float]] = field(default_factory=list)
    """(number of rows, seconds) for each step in which the tower ran."""
    load_times: list[tuple[int, float]] = field(default_factory=list)
    """(number of bytes, seconds) for each time that embeddings were loaded into the engine's cache."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """(rank, token) for each lease whose rows the rank no longer reads."""
    lost: list[tuple[int, str]] = field(default_factory=list)
    """(token, miss reason) for each lease whose rows a rank could not load."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, CornplugECWorkerMetadata)
        self.saves += other.saves
        self.encode_times += other.encode_times
        self.load_times += other.load_times
        self.copied += other.copied
        self.lost += other.lost
        return self
