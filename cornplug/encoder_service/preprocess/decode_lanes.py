"""Decodes and preprocesses media in fair order. Each lane consists of one thread and one process.

    submit ─ EncodeAdmission ─> Batcher ─take─> a lane: its process decodes, its thread preprocesses
                                                one more lane, only for jobs of a better class than
                                                all running jobs

The queue is of the same kind as the queue for towers. A media item's cost is computed from its header, and
the time that lanes need per cost is measured. An item that cannot be prepared in time is refused immediately.

`ByteBudget` limits the bytes of incoming bodies and prepared media in memory, with a share reserved for each
service class. Before an item is decoded, its bytes are estimated from the dimensions in its header and
reserved. The reservation is corrected when the actual size is known, and released with the reply.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.admission import AdmissionRefusal, EncodeAdmission
from cornplug.encoder_service.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.fair_queue import MAX_WAITING, QueueLimit
from cornplug.encoder_service.formats.messages import EncodeRequest
from cornplug.encoder_service.preprocess.decoder_process import DecoderProcess, SandboxedDecoder
from cornplug.encoder_service.preprocess.decoders import MediaHeader
from cornplug.encoder_service.preprocess.preprocessor import PreprocessContext
from cornplug.encoder_service.service_metrics import Queue
from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass

DECODE_DEADLINE_S: Final = 30.0
"""Maximum seconds for decoding one media item. After that, the decoding process is killed and the item is
rejected ("too_slow")."""
STUCK_S: Final = 10.0
"""Seconds after which the service is not ready if every lane is still running the same job."""
_MAX_COST: Final = 1 << 40
_CLOSE_TIMEOUT_S: Final = 1.0
"""Maximum seconds that a stopping service waits for a running image processor."""
_STOPPING_RETRY_S: Final = 1.0
_MIN_DEADLINE_S: Final = 0.001
_MIN_MEASURED: Final = 8
"""Number of prepared items of a modality after which predictions may cause refusals. The first items take
longer, because they load and compile code."""
_BASE_COST: Final = 1000
"""Constant part of an item's cost. For an item of any size, the processor takes about as long as decoding a
million pixels. Without this term, the measured times of small images would predict hours for a large
image."""

ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)


class _ModalityState:
    """State of one modality. Admission of preprocessing measures times per modality, as admission of encoding
    does per tower, because a pixel of a video and a pixel of a PNG take different times."""

    prepared_items = 0
    """Number of prepared media items of this modality."""


@dataclass(slots=True, eq=False, kw_only=True)
class _LaneTask:
    """Work of a lane for one media item."""

    run: Callable[[PreprocessContext], Any]
    budget_share: BudgetShare
    future: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Limits for decoding one media item."""

    decode_s: float = DECODE_DEADLINE_S
    max_bytes: int = 4 << 30
    """Maximum address space of a decoding process in bytes."""


class QueuedWork(Generic[ResultT]):
    """Queued or running work on a media item. Call `cancel` when the request is abandoned."""

    def __init__(self, future: Future[ResultT], cancel: Callable[[], None]) -> None:
        self.future = future
        self.cancel = cancel


class DecodeLanes:
    """Queue of media items, and the lanes that decode and preprocess them. Thread-safe. Threads start with
    the first item, and `close` ends the threads and the processes."""

    def __init__(
        self,
        classes: Sequence[ServiceClass],
        *,
        lanes: int,
        limits: DecodeLimits,
        max_waiting: int = MAX_WAITING,
        on_killed: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._classes = classes
        self._lanes = lanes
        self._limits = limits
        self._clock = clock
        self._queue_limit = QueueLimit(classes, max_waiting)
        self._admission = EncodeAdmission(max_items=1, max_tokens=_MAX_COST, clock=clock, lanes=lambda: lanes)
        self._batcher: Batcher[_LaneTask] = Batcher(
            max_items=1, max_tokens=_MAX_COST, clock=clock, on_late=self._refuse_late, has_urgent_lane=True
        )
        self._modalities: dict[Modality, _ModalityState] = {
            "image": _ModalityState(),
            "video": _ModalityState(),
            "audio": _ModalityState(),
        }
        self._job_numbers = itertools.count()
        self._tasks: dict[PendingRequest, _LaneTask] = {}
        self._processes = [
            DecoderProcess(max_bytes=limits.max_bytes, on_killed=on_killed) for _ in range(lanes + 1)
        ]
        # Preprocessing runs in this pool, so that the future catches its exceptions and the lane continues.
        self._preprocessing = ThreadPoolExecutor(lanes + 1, "cornplug-preprocess")
        self._threads: list[threading.Thread] = []
        self._start_lock = threading.Lock()
        self._broken = False
        self._closed = False

    def submit(
        self,
        modality: Modality,
        run: Callable[[PreprocessContext], ResultT],
        *,
        cost: int,
        qos: ServiceClass,
        app: str,
        deadline_s: float,
        budget_share: BudgetShare,
    ) -> QueuedWork[ResultT] | AdmissionRefusal:
        """Queue a media item. A lane later calls `run`.

        Returns an AdmissionRefusal if the item cannot be prepared in time or if the queue is full. `cost` is
        an estimate of `decode_cost` before the header is known. The future has the result or the error of
        `run`, or EncoderRefused("too_late") if no lane began the work before the deadline.
        """
        if self._closed:
            return AdmissionRefusal(
                reason="overloaded", message="the service is stopping", retry_after_s=_STOPPING_RETRY_S
            )
        self._start_threads()
        request = EncodeRequest(
            id=0,
            identity=b"",
            key=b"",
            cache_salt=None,
            inputs={},
            app=app,
            deadline_s=max(deadline_s, _MIN_DEADLINE_S),
        )
        pending = PendingRequest(request=request, received_s=self._clock(), qos=qos)
        task = _LaneTask(run=run, budget_share=budget_share)
        name = next(self._job_numbers).to_bytes(8, "big")
        job = EncodeJob(
            key=(name, b""),
            feature_key=name,
            tower=self._modalities[modality],
            tokens=max(1, cost),
            payload=task,
            requests=[pending],
        )
        refusal = self._admission.admit(job, self._batcher)
        if refusal is not None and self._modalities[modality].prepared_items >= _MIN_MEASURED:
            return refusal
        if (full := self._queue_limit.acquire(pending)) is not None:
            return AdmissionRefusal(
                reason=full[0],
                message=f"{full[1]} (waiting to be decoded)",
                retry_after_s=self._admission.predict_half_drained_s(self._batcher),
            )
        self._tasks[pending] = task
        self._batcher.join_or_add(job)
        return QueuedWork(task.future, lambda: self._cancel(job, pending))

    def predict_by_class_s(self) -> Mapping[str, float]:
        """Return the predicted seconds until a new media item would be prepared, by class. The new item is
        assumed to be like the last item of the class."""
        return self._admission.predict_by_class_s(self._classes, self._batcher)

    def predict_class_s(self, qos: ServiceClass) -> float:
        """Return the prediction of `predict_by_class_s` for one class."""
        return self._admission.predict_class_s(qos, self._batcher)

    def queue_by_class(self) -> Queue:
        """Return (number of items, total cost) that wait for a lane, by class. For the cost, see
        `decode_cost`."""
        return self._batcher.queue_by_class()

    def is_ready(self) -> bool:
        """Return whether a new media item would soon be decoded.

        True if a lane is free or has started a job within the last STUCK_S seconds, decoding processes can
        start, and the lanes are not closed.
        """
        running = self._batcher.current_load().running
        now = self._clock()
        stuck = len(running) >= self._lanes and all(now - task.started_s > STUCK_S for task in running)
        return not (stuck or self._broken or self._closed)

    def process_ids(self) -> list[int]:
        """Return the process ids of the decoding processes."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def start_processes(self) -> None:
        """Start the decoding processes, so that the first media items do not wait for them. Raises
        EncoderRefused if a process does not start."""
        # With one class, no job could use the extra lane.
        wanted = self._processes if len(self._classes) > 1 else self._processes[: self._lanes]
        with ThreadPoolExecutor(len(wanted), "cornplug-start") as starting:
            list(starting.map(DecoderProcess.start, wanted))

    def close(self) -> bool:
        """Stop all decoding, and end the threads and processes. Return False if an image processor is still
        running."""
        self._closed = True
        for process in self._processes:
            process.stop()
        self._batcher.close()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            for process in self._processes:
                process.close()
        self._preprocessing.shutdown(wait=False, cancel_futures=True)
        return ended

    def _start_threads(self) -> None:
        with self._start_lock:
            if self._threads or self._closed:
                return
            for process in self._processes[: self._lanes]:
                self._threads.append(threading.Thread(target=self._serve, args=(process,), daemon=True))
            urgent = threading.Thread(target=self._serve_urgent, args=(self._processes[-1],), daemon=True)
            self._threads.append(urgent)
            for i, thread in enumerate(self._threads):
                thread.name = f"cornplug-prepare-{i}"
                thread.start()

    def _serve(self, process: DecoderProcess) -> None:
        while taken := self._batcher.take_batch():
            self._run_job(taken[0], process)

    def _serve_urgent(self, process: DecoderProcess) -> None:
        while (job := self._batcher.take_urgent_job(self._lanes)) is not None:
            self._run_job(job, process)

    def _run_job(self, job: EncodeJob[_LaneTask], process: DecoderProcess) -> None:
        pending, task = job.requests[0], job.payload
        began = self._clock()
        try:
            if task.future.set_running_or_notify_cancel():
                self._run_task(job, pending, task, process, began)
        finally:
            self._batcher.finish(job)
            self._release_slot(pending)
            self._restart_lost_process(process)

    def _restart_lost_process(self, process: DecoderProcess) -> None:
        """If the last job ended the process, start a new process before this lane takes another job."""
        if process.is_lost and not self._closed:
            try:
                process.start()
            except EncoderRefused as e:
                log.error("%s", e)
                self._broken = True

    def _run_task(
        self,
        job: EncodeJob[_LaneTask],
        pending: PendingRequest,
        task: _LaneTask,
        process: DecoderProcess,
        began: float,
    ) -> None:
        def admit(header: MediaHeader, prepared_bytes: int) -> None:
            self._batcher.raise_cost(job, decode_cost(header))
            task.budget_share.resize(header.decoded_bytes + prepared_bytes)

        context = PreprocessContext(
            decoder=SandboxedDecoder(
                process,
                limit_s=self._limits.decode_s,
                end_s=time.monotonic() + pending.due_s - self._clock(),
                is_needed=lambda: not pending.future.cancelled(),
            ),
            admit=admit,
        )
        done = self._preprocessing.submit(task.run, context)
        error = done.exception()
        now = self._clock()
        self._admission.record_reply(pending, now - pending.received_s)
        self._broken = isinstance(error, EncoderRefused) and error.reason == "internal"
        if error is not None:
            task.future.set_exception(error)
        else:
            # Measure only successful jobs, because refused and killed jobs end early.
            self._admission.record_batch([job], now - began)
            if isinstance(job.tower, _ModalityState):
                job.tower.prepared_items += 1
            task.future.set_result(done.result())

    def _cancel(self, job: EncodeJob[_LaneTask], pending: PendingRequest) -> None:
        pending.future.cancel()
        if self._batcher.remove(job):
            self._release_slot(pending)

    def _refuse_late(self, pending: PendingRequest) -> None:
        task = self._tasks.get(pending)
        self._release_slot(pending)
        self._admission.record_reply(pending, self._clock() - pending.received_s)
        if task is not None and task.future.set_running_or_notify_cancel():
            problem = f"the medium was not decoded within {pending.request.deadline_s:.3g} s"
            task.future.set_exception(EncoderRefused(problem, reason="too_late"))

    def _release_slot(self, pending: PendingRequest) -> None:
        self._tasks.pop(pending, None)
        self._queue_limit.release(pending)


def decode_cost(header: MediaHeader) -> int:
    """Return the cost of a media item: thousands of pixels or samples to decode, plus a constant."""
    return _BASE_COST + round(header.work / 1000)


class ByteBudget:
    """Budget of bytes, shared by all classes. Thread-safe. A class may use its own reserved bytes and all
    unreserved bytes."""

    def __init__(self, fractions: Mapping[ServiceClass, float], max_bytes: int, *, purpose: str) -> None:
        """Create a budget of `max_bytes`, in which each class reserves a fraction.

        `purpose` completes the message "5 bytes are needed ..." of refusals. If there is a single class,
        nothing is reserved.
        """
        self.max_bytes: Final = max_bytes
        self._purpose = purpose
        several = len(fractions) > 1
        self._reserved = {qos: int(part * max_bytes) for qos, part in fractions.items()} if several else {}
        self._lock = threading.Lock()
        self._used_bytes: Counter[ServiceClass] = Counter()

    def open_share(self, qos: ServiceClass) -> BudgetShare:
        """Return a budget share for one media item or body. It initially holds 0 bytes."""
        return BudgetShare(self, qos)

    def count_used_bytes(self) -> int:
        """Return the number of bytes that all shares hold now."""
        with self._lock:
            return sum(self._used_bytes.values())

    def adjust(self, qos: ServiceClass, more: int, total: int) -> None:
        """Change a share by `more` bytes, so that it has `total` bytes. A negative number releases bytes.

        Raises the same errors as `BudgetShare.resize`.
        """
        with self._lock:
            if more > 0:
                set_aside = sum(
                    max(0, reserved - self._used_bytes[q])
                    for q, reserved in self._reserved.items()
                    if q != qos
                )
                limit = self.max_bytes - sum(reserved for q, reserved in self._reserved.items() if q != qos)
                if total > limit:
                    raise EncoderRefused(
                        f"{total} bytes are needed {self._purpose}, and the limit for this class is {limit}; "
                        "send a smaller medium",
                        reason="too_large_prepared",
                    )
                if sum(self._used_bytes.values()) + set_aside + more > self.max_bytes:
                    raise EncoderRefused(
                        f"no memory is free for the {total} bytes needed {self._purpose}; retry later",
                        reason="overloaded",
                    )
            self._used_bytes[qos] += more


class BudgetShare:
    """Bytes of the budget that one media item or body holds. The context manager releases them on exit.
    Thread-safe."""

    def __init__(self, budget: ByteBudget, qos: ServiceClass) -> None:
        self._budget = budget
        self._qos = qos
        self._lock = threading.Lock()
        self._bytes = 0
        self._open = True

    def resize(self, size: int) -> None:
        """Change the number of bytes that this share holds to `size`.

        If this raises EncoderRefused, the share is unchanged. The reason is "too_large_prepared" if `size`
        bytes can never fit. It is "overloaded" if they do not fit now or if the request was cancelled.
        """
        with self._lock:
            if not self._open:
                raise EncoderRefused("the request was cancelled", reason="overloaded")
            self._budget.adjust(self._qos, size - self._bytes, size)
            self._bytes = size

    def close(self) -> None:
        """Release all bytes."""
        with self._lock:
            if self._open:
                self._budget.adjust(self._qos, -self._bytes, 0)
                self._bytes, self._open = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
