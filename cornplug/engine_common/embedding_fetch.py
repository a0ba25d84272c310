"""Policy for fetching an embedding from the encoder service, shared by the vLLM and SGLang plugins.

    not in the store ──allowed──> requested ──valid reply────────> "service_*"
                          │         └─ error, late, invalid ─> a miss; a failed service starts a back-off
                          └─ unidentified, not served, down, backed off ─> a miss

This module does no I/O, and uses no threads or clock. The vLLM plugin polls for replies from an engine's
loop, and the SGLang plugin awaits them on an event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.codec import ITEM_BYTES
from cornplug.encoder_service.wire.messages import EncodeReply
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import CodecError, CornplugError, EncoderError, EncoderUnavailable

_STEPS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_NOT_ITS_FAULT: Final = frozenset({"encoder_down", "bad_input", "no_inputs", "shm_cache"})
"""Error reasons that do not start a backoff, because no service is running, or only one image is affected."""


class BackOff:
    """Increasing backoff after failures of the encoder service.

    All times are seconds on the same monotonic clock. Used by one thread.
    """

    def __init__(self) -> None:
        self._ask_after = 0.0
        self._failures = 0

    def spares(self, now: float) -> bool:
        """Return whether requests should not be sent to the service now, because it failed recently."""
        return now < self._ask_after

    def failed(self, error: EncoderError, now: float) -> None:
        """Record a failed request. Requests that were in flight together count as one failure."""
        if error.reason not in _NOT_ITS_FAULT and now >= self._ask_after:
            self._ask_after = now + _STEPS_S[min(self._failures, len(_STEPS_S) - 1)]
            self._failures += 1

    def answered(self) -> None:
        """Record a reply from the service, which ends the backoff."""
        self._ask_after, self._failures = 0.0, 0


@dataclass(frozen=True, slots=True)
class ExpectedEmbedding:
    """Key, shape and dtype that an engine expects of an embedding."""

    key: bytes
    rows: int
    width: int | None = None
    """Number of columns of the embedding, or None if the language model's width is unknown."""
    dtype: str | None = None
    """Name of the torch dtype without the "torch." prefix, or None if unknown."""

    def check(self, dtype: str, shape: Sequence[int], size_bytes: int) -> None:
        """Raise CodecError("wrong_shape") unless an embedding with this dtype, shape and size matches what is
        expected."""
        wanted = (self.rows, shape[-1] if self.width is None and shape else self.width)
        if tuple(shape) != wanted or dtype not in ITEM_BYTES or self.dtype not in (None, dtype):
            raise CodecError(f"{dtype} {tuple(shape)}", reason="wrong_shape")
        if size_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CodecError(
                f"expected {dtype} {tuple(shape)}, received {size_bytes} bytes", reason="wrong_shape"
            )


class EncoderRequestPolicy:
    """Decides whether to send a request to the encoder service, and whether to accept the service's reply.
    All times are seconds on the same monotonic clock. Used by one thread."""

    def __init__(self) -> None:
        self._backoff = BackOff()

    def identity_to_ask(
        self, tower: TowerIdentity | None, *, identified: bool, refusal: EncoderError | None, now: float
    ) -> bytes:
        """Return the model identity to send in a request to the encoder service.

        Args:
            tower: identity of the engine's tower, or None.
            identified: whether the identification has ended, so that None means that there is no identity.
            refusal: the error with which the connection would reject a request immediately, if any.

        Raises EncoderError if no request should be sent now. Call this before packing the pixels, which takes
        tens of milliseconds.
        """
        if tower is None or tower.served_identity is None:
            reason = "not_served" if identified else "identifying"
            raise EncoderUnavailable("no encoder service is known to serve this model", reason=reason)
        if refusal is not None:
            raise refusal
        if self._backoff.spares(now):
            raise EncoderUnavailable("the encoder service failed recently", reason="encoder_backoff")
        return tower.served_identity

    def replied(self, reply: EncodeReply, expected: ExpectedEmbedding) -> str:
        """Check the reply to a request, and return the source of the embedding as a metrics label. If the
        reply has no tensor, the embedding is in the store.

        Raises EncoderUnavailable("encoder_bad_response"), CodecError("wrong_shape").
        """
        self._backoff.answered()
        if reply.key != expected.key:
            raise EncoderUnavailable(
                "the encoder service replied with a different key", reason="encoder_bad_response"
            )
        if reply.tensor is not None:
            expected.check(reply.tensor.dtype, reply.tensor.shape, len(reply.tensor.data))
        return f"service_{reply.origin}"

    def failed(self, error: CornplugError, now: float) -> str:
        """Return the miss reason for a request that failed with this error. Failures of the service start a
        backoff."""
        if isinstance(error, EncoderError):
            self._backoff.failed(error, now)
        return error.reason

    def late(self, now: float) -> str:
        """Return the miss reason for a request that exceeded its deadline, which counts as a failure of the
        service."""
        return self.failed(
            EncoderUnavailable("the encoder service did not reply in time", reason="encoder_timeout"), now
        )
