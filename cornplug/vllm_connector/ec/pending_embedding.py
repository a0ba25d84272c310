"""An embedding that the scheduler half of the encoder-cache connector waits for."""

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
    """One medium on its way. Touched by the engine's thread alone, but for `answer`."""

    identifier: str
    expected: ExpectedEmbedding
    size: int
    """Payload bytes."""
    deadline: float
    began: float
    waiting: set[str] = field(default_factory=set)
    answer: Future[EncodeReply] | None = None
    """The service's, set once the request has been sent."""
    arrived: ArrivedEmbedding | None = None
    source: str = ""
    failed: str = ""

    @property
    def usable(self) -> bool:
        """Whether it is here, and is what the engine's tower computes."""
        stale = is_stale(self.identifier, weights_guard.epoch())
        return self.arrived is not None and not stale and not weights_guard.replaced()

    @property
    def settled(self) -> bool:
        """Whether it is here, or will not come."""
        return self.arrived is not None or bool(self.failed)
