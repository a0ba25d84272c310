"""Simulates one replica of a language model's engine, with iterations that prefill, decode, or do both.

The scheduler (`group_scheduler.py`) decides what an iteration computes. Iterations without prefill differ
only in their context, which grows by one token per request, so consecutive iterations without prefill are one
event: n iterations of b requests with c tokens of context take n·decode(b) + kv_token_s·(n·c + b·n·(n-1)/2).
If a request is admitted, this event ends with the current iteration.

With attention data parallelism, a replica has several schedulers. A request goes to the scheduler with the
fewest requests, as in vLLM's coordinator and SGLang's controller. The groups share the experts, so they run
in lockstep: each iteration takes as long as the iteration of the busiest group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.group_scheduler import GroupScheduler
from cornplug.planner.simulator.replicas import EventAgenda, TokenLog
from cornplug.planner.simulator.stations import QueuePeak, Station


class EngineReplica:
    def __init__(self, station: Station, agenda: EventAgenda, log: TokenLog) -> None:
        assert station.steps is not None
        self._steps, self._prefills = station.steps, "P" in station.tasks
        self._agenda, self._log = agenda, log
        self._groups = [GroupScheduler(station, log) for _ in range(station.groups)]
        self._version = 0
        self._start = self._until = 0.0
        self._count = 0
        """Number of iterations in the current piece of work."""
        self._idle = True
        self._mixed = False
        self.outstanding = 0
        self.busy_s = 0.0

    # Calls from the event loop and the router -------------------------------------------------

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        groups = self._groups
        group = groups[0] if len(groups) == 1 else min(groups, key=lambda one: one.outstanding)
        group.check_fits(request)
        self.outstanding += 1
        if not self._prefills and request.output_tokens == 1:
            # Prefill has already generated the only token. Add an event, because a job may leave only in
            # `wake`.
            self._agenda.add(now, self, -1 - job)
            return
        group.queue(job, request)
        if self._idle:
            # Add an event instead of a call, so that requests that arrive at the same time share the
            # iteration.
            self._schedule(now, 0, 0.0)
        elif not self._mixed and group.admits_next(job):
            self._cut_short(now)

    def wake(self, now: float, token: int) -> Sequence[int]:
        if token < 0:
            self.outstanding -= 1
            return (-1 - token,)
        if token != self._version:
            return ()
        self.busy_s += self._log.within(self._start, now)
        left = self._groups[0].end(self._count, now)
        for group in self._groups[1:]:
            left += group.end(self._count, now)
        self.outstanding -= len(left)
        self._begin(now)
        return left

    def load(self, now: float) -> float:
        """Return the remaining work in seconds.

        Prompts count as if they ran alone, and decoding requests with their share of a full batch.
        """
        work_s = max(group.work_s for group in self._groups)
        return work_s + (max(self._until - now, 0.0) if self._mixed else 0.0)

    @property
    def queue_peak(self) -> QueuePeak:
        peak = QueuePeak()
        for group in self._groups:
            peak |= group.queue_peak
        return peak

    # Pieces of work -------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        filled = [group.fill() for group in self._groups]
        self._mixed = any(tokens for tokens, _ in filled)
        if self._mixed:
            mean = sum(
                tokens + len(group.running) for group, (tokens, _) in zip(self._groups, filled, strict=True)
            ) / len(filled)
            seconds = [
                self._steps.step_s(tokens, len(group.running), group.context, mean=mean) + encode_s
                for group, (tokens, encode_s) in zip(self._groups, filled, strict=True)
            ]
            self._schedule(now, 1, max(seconds))
            return
        leaves = [group.next_leave for group in self._groups if group.running]
        if leaves:
            count = min(leaves)
            self._schedule(now, count, self._decode_run_s(count))
        else:
            self._idle = True

    def _schedule(self, start: float, count: int, seconds: float) -> None:
        """Begin a piece of work of `count` iterations at `start`. It replaces the current piece of work."""
        self._idle = False
        self._start, self._count, self._until = start, count, start + seconds
        self._version += 1
        self._agenda.add(self._until, self, self._version)

    def _decode_run_s(self, iterations: int) -> float:
        """Return the time of consecutive decode iterations.

        With several groups, this is an upper bound, as if one group had the most requests and the most
        context.
        """
        b = self._most_running
        seconds = self._groups[0].decode_step_s(b)
        most = max(group.context for group in self._groups)
        context = iterations * most + b * iterations * (iterations - 1) / 2
        return iterations * seconds + self._steps.kv_token_s * context

    @property
    def _most_running(self) -> int:
        return max(len(group.running) for group in self._groups)

    def _cut_short(self, now: float) -> None:
        """End the consecutive decode iterations after the current iteration."""
        count = self._iterations_by(now - self._start)
        if count < self._count:
            self._schedule(self._start, count, self._decode_run_s(count))

    def _iterations_by(self, seconds: float) -> int:
        """Return the smallest number of consecutive iterations, at least 1, that take `seconds` or more."""
        square = self._steps.kv_token_s * self._most_running / 2
        linear = self._decode_run_s(1) - square
        if not linear:
            return 1
        if square:
            root = (sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        else:
            root = seconds / linear
        count = max(ceil(root), 1)
        # The root has rounding errors, so check against the sum that determines the events.
        if count > 1 and self._decode_run_s(count - 1) >= seconds:
            return count - 1
        return count if self._decode_run_s(count) >= seconds else count + 1
