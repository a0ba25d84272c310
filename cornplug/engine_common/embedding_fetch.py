"""Policy for fetching an embedding from the encoder service, used by both plugins.

    not in the store ──allowed──> requested ──valid reply────────> "service_*"
                          │         └─ error, late, invalid ─> a miss; a failed service starts a back-off
                          └─ unidentified, not served, down, backed off ─> a miss

This module has no I/O, threads or clock. The vLLM plugin polls it from an engine's loop, the SGLang plugin
awaits on an event loop.
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
"""Failures that do not start a backoff: no service is running, or only one image is affected."""


class BackOff:
    """Exponential backoff after a failure of the encoder service.

    Times are seconds of one monotonic clock. Used by one thread.
    """

    def __init__(self) -> None:
        self._ask_after = 0.0
        self._failures = 0

    def spares(self, now: float) -> bool:
        """Return whether requests should skip the service because it failed recently."""
        return now < self._ask_after

    def failed(self, error: EncoderError, now: float) -> None:
        """Record a failure. Requests that were in flight together count as one failure."""
        if error.reason not in _NOT_ITS_FAULT and now >= self._ask_after:
            self._ask_after = now + _STEPS_S[min(self._failures, len(_STEPS_S) - 1)]
            self._failures += 1

    def answered(self) -> None:
        """Record a reply, which ends the backoff."""
        self._ask_after, self._failures = 0.0, 0


@dataclass(frozen=True, slots=True)
class ExpectedEmbedding:
    """Expected form of an embedding that an engine needs."""

    key: bytes
    rows: int
    width: int | None = None
    """Number of columns, or None if the process does not know the language model's width."""
    dtype: str | None = None
    """torch's name without "torch.", or None if unknown."""

    def check(self, dtype: str, shape: Sequence[int], size_bytes: int) -> None:
        """Raise CodecError("wrong_shape") unless an entry or a reply has this form."""
        wanted = (self.rows, shape[-1] if self.width is None and shape else self.width)
        if tuple(shape) != wanted or dtype not in ITEM_BYTES or self.dtype not in (None, dtype):
            raise CodecError(f"{dtype} {tuple(shape)}", reason="wrong_shape")
        if size_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CodecError(
                f"expected {dtype} {tuple(shape)}, received {size_bytes} bytes", reason="wrong_shape"
            )


class EncoderRequestPolicy:
    """Decisions whether to send a request to the encoder service, and whether to accept its reply. Times are
    seconds of one monotonic clock. Used by one thread.
    """

    def __init__(self) -> None:
        self._backoff = BackOff()

    def identity_to_ask(
        self, tower: TowerIdentity | None, *, identified: bool, refusal: EncoderError | None, now: float
    ) -> bytes:
        """Return the model identity for a request to the service.

        Args:
            tower: the engine's tower, or None. `identified` distinguishes an engine without a tower from an
            engine that has not identified it yet.
            refusal: the error with which the connection would reject a request immediately, if any.

        Raises EncoderError if no request should be sent. Packing pixels takes tens of milliseconds, so call
        this first.
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
        """Return the source of an embedding as a metrics label. If the reply has no tensor, the embedding is
        in the store.

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
        """Return the miss reason for a failed request. Failures of the service start a backoff."""
        if isinstance(error, EncoderError):
            self._backoff.failed(error, now)
        return error.reason

    def late(self, now: float) -> str:
        """Return the miss reason for a request that exceeded its deadline."""
        return self.failed(
            EncoderUnavailable("the encoder service did not reply in time", reason="encoder_timeout"), now
        )
