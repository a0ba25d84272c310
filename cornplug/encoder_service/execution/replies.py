"""Answers to requests, each counted before its caller sees it."""

from __future__ import annotations

import time
from typing import Literal

from cornplug.encoder_service.scheduling.admission import EncodeAdmission
from cornplug.encoder_service.scheduling.batcher import PendingRequest
from cornplug.encoder_service.telemetry.observer import RequestObserver
from cornplug.encoder_service.wire.messages import EncodeRefusal, EncodeReply, WireTensor

Origin = Literal["computed", "coalesced", "cached"]
Reason = Literal["unknown_model", "bad_input", "overloaded", "over_share", "too_late", "internal"]


class RequestReplies:
    """Answers pending requests, and tells metrics and admission how long they took. Thread-safe."""

    def __init__(self, admission: EncodeAdmission, observer: RequestObserver) -> None:
        self._admission = admission
        self._observer = observer

    def answer(
        self, pending: PendingRequest, origin: Origin, *, stored: bool, tensor: WireTensor | None
    ) -> EncodeReply:
        """Send one request its embedding; the answer that was sent."""
        seconds = time.monotonic() - pending.received_s
        request = pending.request
        reply = EncodeReply(
            id=request.id,
            key=request.key,
            origin=origin,
            stored=stored,
            tensor=tensor,
            service_time_s=seconds,
        )
        # Counted before the caller hears of it, so that it finds itself in the next scrape.
        self._admission.answered(pending, seconds)
        self._observer.answered(pending, origin, stored=stored, seconds=seconds)
        pending.answer(reply)
        return reply

    def refuse(
        self, pending: PendingRequest, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> None:
        """Tell one request why it gets no embedding; nothing where it has an answer."""
        if pending.future.done():
            return
        self._observer.refused(pending, reason)
        pending.answer(
            EncodeRefusal(id=pending.request.id, reason=reason, message=message, retry_after_s=retry_after_s)
        )

    def refuse_late(self, pending: PendingRequest) -> None:
        """Tell one request that its deadline passed before a tower began with it."""
        self._admission.answered(pending, time.monotonic() - pending.received_s)
        self.refuse(pending, "too_late", f"the work did not start within {pending.request.deadline_s:g} s")
