"""Simulates one engine scheduler, which serves a complete replica or one attention-DP group.

It has a queue, a batch and KV. An iteration computes waiting prompts by priority and in order of arrival, up
to `chunk_tokens` minus one token per decoding request. A request is admitted if fewer than `max_batch`
requests are running and the KV of its complete prompt and output fits into the cache in addition to all
reservations. The media items of a prompt (tasks with E) are encoded in the iteration of its first chunk.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.replicas import TokenLog, batches_s, isolated_prefill_s
from cornplug.planner.simulator.stations import QueuePeak, Station


class GroupScheduler:
    def __init__(self, station: Station, log: TokenLog) -> None:
        assert station.steps is not None
        self._station, self._steps, self._log = station, station.steps, log
        self._prefills, self._decodes = "P" in station.tasks, "D" in station.tasks
        self._weighs = station.router == "least_work" and station.replicas > 1
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
        self._prefilling = self._most_prefilling = self._most_waiting = 0
        """Number of prompt tokens of requests that have not finished prefill, its peak, and the peak number
        of waiting requests."""
        self.outstanding = 0

    @property
    def queue_peak(self) -> QueuePeak:
        return QueuePeak(self._most_waiting, self._most_prefilling)

    @property
    def next_leave(self) -> int:
        """Number of iterations until the first running request leaves."""
        return self.running[0][0] - self._iteration

    # Admission ------------------------------------------------------------------------------

    def queue(self, job: int, request: SampledRequest) -> None:
        """Insert a request after the requests of the same or higher priority, as both engines do."""
        self.outstanding += 1
        self.work_s += self._prefill_work_s(request) + self._decode_work_s(request)
        priority, at = self._log.priority, len(self._waiting)
        while at and priority[self._waiting[at - 1][0]] < priority[job]:
            at -= 1
        self._waiting.insert(at, (job, request))
        self._prefilling += request.prompt_tokens if self._prefills else 0
        self._most_waiting = max(self._most_waiting, len(self._waiting))
        self._most_prefilling = max(self._most_prefilling, self._prefilling)

    def admits_next(self, job: int) -> bool:
        """Return whether `job` is first in the queue and could join an iteration that starts now."""
        first, request = self._waiting[0]
        return first == job and self._admissible(request)

    def check_fits(self, request: SampledRequest) -> None:
        """Raise ConfigError if the request's KV is larger than the cache."""
        if self._needs(request) > self._station.kv_tokens:
            raise ConfigError(
                f"{self._station.name}.kv_tokens",
                f"a request needs {self._needs(request)} tokens of KV, but the replica has "
                f"{self._station.kv_tokens}",
                "Give the replica more memory or GPUs, or shorten the requests (`max` of their lengths).",
            )

    def _needs(self, request: SampledRequest) -> int:
        """Return the number of KV tokens that the request needs in total on this replica."""
        return request.prompt_tokens + request.output_tokens if self._decodes else request.prompt_tokens

    def _admissible(self, request: SampledRequest) -> bool:
        if self._reserved + self._needs(request) > self._station.kv_tokens:
            return False
        if not self._decodes:
            return True
        admitted = len(self.running) + len(self.prefilled) + (self._partial is not None)
        room_in_chunk = not self._prefills or len(self.running) < self._station.chunk_tokens
        return admitted < self._station.max_batch and room_in_chunk

    def _admit(self) -> tuple[int, SampledRequest]:
        job, request = self._waiting.popleft()
        self._reserved += self._needs(request)
        return job, request

    # An iteration ---------------------------------------------------------------------------

    def fill(self) -> tuple[int, float]:
        """Choose the requests of the next iteration.

        Returns (number of prompt tokens, seconds to encode the prompts' media items).
        """
        return self._pack() if self._prefills else self._join()

    def _join(self) -> tuple[int, float]:
        """Admit requests whose prompt was computed on another replica."""
        while self._waiting and self._admissible(self._waiting[0][1]):
            self._run(*self._admit())
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
                    encode_s += batches_s(self._station, request.patches)
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

    def _run(self, job: int, request: SampledRequest) -> None:
        heappush(self.running, (self._iteration + request.output_tokens - 1, job, request))
        self.context += request.prompt_tokens

    def end(self, iterations: int, now: float) -> list[int]:
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
            self._leave(job, request, now)
            left.append(job)
        return left

    def _end_prefills(self, now: float) -> list[int]:
        left = []
        for job, request in self.prefilled:
            self._log.first_token[job] = now
            self._prefilling -= request.prompt_tokens
            if self._decodes and request.output_tokens > 1:
                self._run(job, request)
            else:
                self._leave(job, request, now)
                left.append(job)
        self.prefilled.clear()
        return left

    def _leave(self, job: int, request: SampledRequest, now: float) -> None:
        self._reserved -= self._needs(request)
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
        return isolated_prefill_s(self._station, request) if self._weighs and self._prefills else 0.0

    def _decode_work_s(self, request: SampledRequest) -> float:
        if not self._weighs or not self._decodes:
            return 0.0
        batch = max(min(self._station.max_batch, self._station.kv_tokens // self._needs(request)), 1)
        return (request.output_tokens - 1) * self.decode_step_s(batch) / batch
