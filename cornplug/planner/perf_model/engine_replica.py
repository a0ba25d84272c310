"""Simulation of one replica of a language model's engine, with iterations that prefill, decode, or do both.

A scheduler has a queue, a batch and a KV cache. An iteration computes waiting prompts by priority and in
order of arrival, up to `chunk_tokens` minus one token per decoding request. A request is admitted if fewer
than `max_batch` requests are running and the KV of its complete prompt and output fits into the cache in
addition to all reservations. The media items of a prompt (tasks with E) are encoded in the iteration of its
first chunk.

Iterations without prefill differ only in their context, which grows by one token per request, so consecutive
iterations without prefill are one event: n iterations of b requests with c tokens of context take n·decode(b)
+ kv_token_s·(n·c + b·n·(n-1)/2). If a request is admitted, this event ends with the current iteration.

With attention data parallelism, a replica has several schedulers. A request goes to the scheduler with the
fewest requests, as in vLLM's coordinator and SGLang's controller. The groups share the experts, so they run
in lockstep: each iteration takes as long as the iteration of the busiest group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, sqrt

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.stations import (
    EventAgenda,
    QueuePeak,
    Station,
    TokenLog,
    encode_batches_s,
    isolated_prefill_s,
)


class EngineReplica:
    def __init__(self, station: Station, agenda: EventAgenda, log: TokenLog) -> None:
        assert station.steps is not None
        self._steps, self._prefills = station.steps, "P" in station.tasks
        self._agenda, self._log = agenda, log
        self._groups = [GroupScheduler(station, log) for _ in range(station.groups)]
        self._version = 0
        self._start = self._until = 0.0
        self._count = 0
        """Number of iterations in the current piece of work, which is one event of the simulation."""
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
        group.enqueue(job, request)
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
        self.busy_s += self._log.measured_overlap_s(self._start, now)
        left = self._groups[0].advance(self._count, now)
        for group in self._groups[1:]:
            left += group.advance(self._count, now)
        self.outstanding -= len(left)
        self._begin(now)
        return left

    def load(self, now: float) -> float:
        """Return the remaining work in seconds.

        A prompt counts with its time if it ran alone, and a decoding request with its share of a full batch's
        time.
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
        filled = [group.fill_iteration() for group in self._groups]
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
        leaves = [group.iterations_until_leave for group in self._groups if group.running]
        if leaves:
            count = min(leaves)
            self._schedule(now, count, self._decode_run_s(count))
        else:
            self._idle = True

    def _schedule(self, start: float, count: int, seconds: float) -> None:
        """Begin a piece of work of `count` iterations at `start`, which replaces the current piece of
        work."""
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
        count = self._iterations_until(now - self._start)
        if count < self._count:
            self._schedule(self._start, count, self._decode_run_s(count))

    def _iterations_until(self, seconds: float) -> int:
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


class GroupScheduler:
    def __init__(self, station: Station, log: TokenLog) -> None:
        assert station.steps is not None
        self._station, self._steps, self._log = station, station.steps, log
        self._prefills, self._decodes = "P" in station.tasks, "D" in station.tasks
        self._tracks_work = station.router == "least_work" and station.replicas > 1
        self._decode_s: dict[int, float] = {}
        self._waiting: deque[tuple[int, SampledRequest]] = deque()
        self._partial: tuple[int, SampledRequest, int] | None = None
        """Partially computed prompt: (job, request, remaining tokens)."""
        self.prefilled: list[tuple[int, SampledRequest]] = []
        """Prompts whose prefill ends in the current iteration."""
        self.running: list[tuple[int, int, SampledRequest]] = []
        """Heap of (iteration after which the request leaves, job, request)."""
        self._iteration = 0
        self.context = 0
        """Number of tokens to which the running requests attend."""
        self._reserved = 0
        self.work_s = 0.0
        self._prefill_tokens = self._max_prefill_tokens = self._max_waiting = 0
        """Number of prompt tokens in requests that have not finished prefill, the peak of this number, and
        the peak number of waiting requests."""
        self.outstanding = 0

    @property
    def queue_peak(self) -> QueuePeak:
        return QueuePeak(self._max_waiting, self._max_prefill_tokens)

    @property
    def iterations_until_leave(self) -> int:
        """Number of iterations until the first running request leaves."""
        return self.running[0][0] - self._iteration

    # Admission ------------------------------------------------------------------------------

    def enqueue(self, job: int, request: SampledRequest) -> None:
        """Insert a request after the requests of the same or higher priority, as both engines do."""
        self.outstanding += 1
        self.work_s += self._prefill_work_s(request) + self._decode_work_s(request)
        priority, at = self._log.priority, len(self._waiting)
        while at and priority[self._waiting[at - 1][0]] < priority[job]:
            at -= 1
        self._waiting.insert(at, (job, request))
        self._prefill_tokens += request.prompt_tokens if self._prefills else 0
        self._max_waiting = max(self._max_waiting, len(self._waiting))
        self._max_prefill_tokens = max(self._max_prefill_tokens, self._prefill_tokens)

    def admits_next(self, job: int) -> bool:
        """Return whether `job` is first in the queue and could join an iteration that starts now."""
        first, request = self._waiting[0]
        return first == job and self._admissible(request)

    def check_fits(self, request: SampledRequest) -> None:
        """Raise ConfigError if the request's KV is larger than the cache."""
        if self._needed_kv_tokens(request) > self._station.kv_tokens:
            raise ConfigError(
                f"{self._station.name}.kv_tokens",
                f"a request needs {self._needed_kv_tokens(request)} tokens of KV, but the replica has "
                f"{self._station.kv_tokens}",
                "Give the replica more memory or GPUs, or shorten the requests (`max` of their lengths).",
            )

    def _needed_kv_tokens(self, request: SampledRequest) -> int:
        """Return the number of KV tokens that the request needs in total on this replica."""
        return request.prompt_tokens + request.output_tokens if self._decodes else request.prompt_tokens

    def _admissible(self, request: SampledRequest) -> bool:
        if self._reserved + self._needed_kv_tokens(request) > self._station.kv_tokens:
            return False
        if not self._decodes:
            return True
        admitted = len(self.running) + len(self.prefilled) + (self._partial is not None)
        room_in_chunk = not self._prefills or len(self.running) < self._station.chunk_tokens
        return admitted < self._station.max_batch and room_in_chunk

    def _admit(self) -> tuple[int, SampledRequest]:
        job, request = self._waiting.popleft()
        self._reserved += self._needed_kv_tokens(request)
        return job, request

    # An iteration ---------------------------------------------------------------------------

    def fill_iteration(self) -> tuple[int, float]:
        """Choose the requests of the next iteration.

        Returns (number of prompt tokens, seconds to encode the prompts' media items).
        """
        return self._pack() if self._prefills else self._admit_prefilled()

    def _admit_prefilled(self) -> tuple[int, float]:
        """Admit requests whose prompt was computed on another replica."""
        while self._waiting and self._admissible(self._waiting[0][1]):
            self._start_decoding(*self._admit())
        return 0, 0.0

    def _pack(self) -> tuple[int, float]:
        budget = self._station.chunk_tokens - len(self.running)
        tokens, encode_s = 0, 0.0
        while tokens < budget:
            if self._partial is not None:
                (job, request, rest), self._partial = self._partial, None
            elif self._waiting and self._admissible(self._waiting[0][1]):
                request = self._waiting[0][1]
                rest = request.computed_tokens
                if not self._station.chunked and tokens and tokens + rest > budget:
                    break
                job, _ = self._admit()
                if "E" in self._station.tasks:
                    encode_s += encode_batches_s(self._station, request.patches)
            else:
                break
            take = min(rest, budget - tokens) if self._station.chunked else rest
            tokens += take
            self.work_s -= self._prefill_work_s(request) * take / request.computed_tokens
            if take < rest:
                self._partial = (job, request, rest - take)
            else:
                self.prefilled.append((job, request))
        return tokens, encode_s

    def _start_decoding(self, job: int, request: SampledRequest) -> None:
        heappush(self.running, (self._iteration + request.output_tokens - 1, job, request))
        self.context += request.prompt_tokens

    def advance(self, iterations: int, now: float) -> list[int]:
        """Advance by `iterations` and return the jobs that leave."""
        left = self._end_decodes(iterations, now)
        if self.prefilled:
            left += self._end_prefills(now)
        self.outstanding -= len(left)
        return left

    def _end_decodes(self, iterations: int, now: float) -> list[int]:
        self._iteration += iterations
        self.context += iterations * len(self.running)
        left = []
        while self.running and self.running[0][0] <= self._iteration:
            _, job, request = heappop(self.running)
            self.context -= request.prompt_tokens + request.output_tokens - 1
            self._release(job, request, now)
            left.append(job)
        return left

    def _end_prefills(self, now: float) -> list[int]:
        left = []
        for job, request in self.prefilled:
            self._log.first_token[job] = now
            self._prefill_tokens -= request.prompt_tokens
            if self._decodes and request.output_tokens > 1:
                self._start_decoding(job, request)
            else:
                self._release(job, request, now)
                left.append(job)
        self.prefilled.clear()
        return left

    def _release(self, job: int, request: SampledRequest, now: float) -> None:
        self._reserved -= self._needed_kv_tokens(request)
        self.work_s -= self._decode_work_s(request)
        if self._decodes:
            self._log.last_token[job] = now

    # Times ----------------------------------------------------------------------------------

    def decode_step_s(self, requests: int) -> float:
        """Return the time of an iteration that decodes one token for each of `requests` requests.

        The time for the requests' context is not included.
        """
        seconds = self._decode_s.get(requests)
        if seconds is None:
            seconds = self._decode_s[requests] = self._steps.decode(requests)
        return seconds

    def _prefill_work_s(self, request: SampledRequest) -> float:
        return isolated_prefill_s(self._station, request) if self._tracks_work and self._prefills else 0.0

    def _decode_work_s(self, request: SampledRequest) -> float:
        if not self._tracks_work or not self._decodes:
            return 0.0
        batch = max(
            min(self._station.max_batch, self._station.kv_tokens // self._needed_kv_tokens(request)), 1
        )
        return (request.output_tokens - 1) * self.decode_step_s(batch) / batch
