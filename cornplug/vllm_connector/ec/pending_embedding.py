"""An embedding for which the scheduler half of the encoder-cache connector waits."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from cornplug.encoder_service.wire.messages import EncodeReply
from cornplug.engine_common import weights_guard
from cornplug.engine_common.embedding_fetch import ExpectedEmbedding
from cornplug.vllm_connector.ec.metadata import ArrivedEmbedding
from cornplug.vllm_connector.ec.mm_identifiers import is_stale


@dataclass(slots=True)
class PendingEmbedding:
    """A medium in flight. Only `answer` is accessed by other threads than the engine's."""

    identifier: str
    expected: ExpectedEmbedding
    size: int
    """Size of the payload in bytes."""
    deadline: float
    began: float
    waiting: set[str] = field(default_factory=set)
    answer: Future[EncodeReply] | None = None
    """The service's reply, set after the request has been sent."""
    arrived: ArrivedEmbedding | None = None
    source: str = ""
    failed: str = ""

    @property
    def usable(self) -> bool:
        """Whether it has arrived, and was computed by the engine's tower."""
        stale = is_stale(self.identifier, weights_guard.epoch())
        return self.arrived is not None and not stale and not weights_guard.replaced()

    @property
    def settled(self) -> bool:
        """Whether it has arrived, or will not arrive."""
        return self.arrived is not None or bool(self.failed)
