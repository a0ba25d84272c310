"""One replica of a language model's engine: iterations that prefill, decode, or both.

An iteration takes waiting prompts by priority, first in first out, up to `chunk_tokens`, less one token
for each request that decodes, and gives every request that decodes one token. A request is admitted when
fewer than `max_batch` are and the KV of its whole prompt and output fits the cache beside all
reservations. The items of a prompt (tasks with E) are encoded in the iteration of its first chunk.

Iterations without prefill differ only in the context they read, which grows by one token a
request, so a run of them is one event: n iterations of b requests with c tokens of context take
n·decode(b) + kv_token_s·(n·c + b·n·(n-1)/2). An admission cuts the run short at the iteration it
falls in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, sqrt

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.replicas import EventAgenda, TokenLog, batches_s, isolated_prefill_s
from cornplug.planner.simulator.stations import QueuePeak, Station


class EngineReplica:
    def __init__(self, station: Station, agenda: EventAgenda, log: TokenLog) -> None:
        assert station.steps is not None
        self._station, self._steps = station, station.steps
        self._agenda, self._log = agenda, log
        self._prefills, self._decodes = "P" in station.tasks, "D" in station.tasks
        self._weighs = station.router == "least_work" and station.replicas > 1
        self._decode_s: dict[int, float] = {}
        self._waiting: deque[tuple[int, SampledRequest]] = deque()
        self._partial: tuple[int, SampledRequest, int] | None = None
        """A prompt of which so many tokens are still to be computed."""
        self._prefilled: list[tuple[int, SampledRequest]] = []
        """Prompts that the iteration under way ends."""
        self._running: list[tuple[int, int, SampledRequest]] = []
        """Heap of (iteration after which it leaves, job, draw)."""
        self._iteration = 0
        self._context = 0
        self._reserved = 0
        self._version = 0
        self._start = self._until = 0.0
        self._count = 0
        """Iterations of the piece of work under way."""
        self._idle = True
        self._mixed = False
        self._work_s = 0.0
        self._prefilling = self._most_prefilling = self._most_waiting = 0
        """Prompt tokens of requests whose prefill has not ended, their peak, and that of waiting requests."""
        self.outstanding = 0
        self.busy_s = 0.0

    # Calls of the event loop and the router -------------------------------------------------

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        self._check_fits(request)
        self.outstanding += 1
        if not self._prefills and request.output_tokens == 1:
            # Its only token came out of prefill. A job leaves by `wake` only.
            self._agenda.add(now, self, -1 - job)
            return
        self._work_s += self._prefill_work_s(request) + self._decode_work_s(request)
        self._queue(job, request)
        if self._idle:
            # An event, not a call: requests that come at the same instant share the iteration.
            self._schedule(now, 0, 0.0)
        elif not self._mixed and self._waiting[0][0] == job and self._admissible(request):
            self._cut_short(now)

    def wake(self, now: float, token: int) -> Sequence[int]:
        if token < 0:
            self.outstanding -= 1
            return (-1 - token,)
        if token != self._version:
            return ()
        self.busy_s += self._log.within(self._start, now)
        left = self._end_decodes(now)
        if self._prefilled:
            left += self._end_prefills(now)
        self.outstanding -= len(left)
        self._begin(now)
        return left

    def load(self, now: float) -> float:
        """A prompt counts with its isolated work, a decode as its part of a full batch."""
        return self._work_s + (max(self._until - now, 0.0) if self._mixed else 0.0)

    @property
    def queue_peak(self) -> QueuePeak:
        return QueuePeak(self._most_waiting, self._most_prefilling)

    def _queue(self, job: int, request: SampledRequest) -> None:
        """Behind all of its priority or a higher one, as both engines do."""
        priority, at = self._log.priority, len(self._waiting)
        while at and priority[self._waiting[at - 1][0]] < priority[job]:
            at -= 1
        self._waiting.insert(at, (job, request))
        self._prefilling += request.prompt_tokens if self._prefills else 0
        self._most_waiting = max(self._most_waiting, len(self._waiting))
        self._most_prefilling = max(self._most_prefilling, self._prefilling)

    # Admission ------------------------------------------------------------------------------

    def _check_fits(self, request: SampledRequest) -> None:
        if self._needs(request) > self._station.kv_tokens:
            raise ConfigError(
                f"{self._station.name}.kv_tokens",
                f"{self._station.kv_tokens} tokens of KV cannot hold a request of {self._needs(request)}",
                "Give the replica more memory or GPUs, or shorten the requests (`max` of their lengths).",
            )

    def _needs(self, request: SampledRequest) -> int:
        """Tokens of KV: all that it will have here."""
        return request.prompt_tokens + request.output_tokens if self._decodes else request.prompt_tokens

    def _admissible(self, request: SampledRequest) -> bool:
        if self._reserved + self._needs(request) > self._station.kv_tokens:
            return False
        if not self._decodes:
            return True
        admitted = len(self._running) + len(self._prefilled) + (self._partial is not None)
        room_in_chunk = not self._prefills or len(self._running) < self._station.chunk_tokens
        return admitted < self._station.max_batch and room_in_chunk

    def _admit(self) -> tuple[int, SampledRequest]:
        job, request = self._waiting.popleft()
        self._reserved += self._needs(request)
        return job, request

    # Pieces of work -------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        tokens, encode_s = self._pack() if self._prefills else self._join()
        self._mixed = tokens > 0
        if self._mixed:
            self._schedule(now, 1, self._steps.step_s(tokens, len(self._running), self._context) + encode_s)
        elif self._running:
            count = self._running[0][0] - self._iteration
            self._schedule(now, count, self._decode_run_s(count))
        else:
            self._idle = True

    def _schedule(self, start: float, count: int, seconds: float) -> None:
        """Begin a piece of work at `start`, in place of the one under way."""
        self._idle = False
        self._start, self._count, self._until = start, count, start + seconds
        self._version += 1
        self._agenda.add(self._until, self, self._version)

    def _join(self) -> tuple[int, float]:
        """Requests whose prompt was computed elsewhere."""
        while self._waiting and self._admissible(self._waiting[0][1]):
            self._run(*self._admit())
        return 0, 0.0

    def _pack(self) -> tuple[int, float]:
        """Prompts of the next iteration: their tokens, and the seconds to encode their items."""
        budget = self._station.chunk_tokens - len(self._running)
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
            self._work_s -= self._prefill_work_s(request) * take / request.computed_tokens
            if take < rest:
                self._partial = (job, request, rest - take)
            else:
                self._prefilled.append((job, request))
        return tokens, encode_s

    def _decode_run_s(self, iterations: int) -> float:
        b = len(self._running)
        seconds = self._decode_step_s(b)
        context = iterations * self._context + b * iterations * (iterations - 1) / 2
        return iterations * seconds + self._steps.kv_token_s * context

    def _decode_step_s(self, requests: int) -> float:
        seconds = self._decode_s.get(requests)
        if seconds is None:
            seconds = self._decode_s[requests] = self._steps.decode(requests)
        return seconds

    def _cut_short(self, now: float) -> None:
        """End a run of decode iterations with the one that is under way."""
        count = self._iterations_by(now - self._start)
        if count < self._count:
            self._schedule(self._start, count, self._decode_run_s(count))

    def _iterations_by(self, seconds: float) -> int:
        """Fewest iterations of the run that take at least so long; 1 or more."""
        square = self._steps.kv_token_s * len(self._running) / 2
        linear = self._decode_run_s(1) - square
        if not linear:
            return 1
        if square:
            root = (sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        else:
            root = seconds / linear
        count = max(ceil(root), 1)
        # The root is rounded; the sum that the events are made of decides.
        if count > 1 and self._decode_run_s(count - 1) >= seconds:
            return count - 1
        return count if self._decode_run_s(count) >= seconds else count + 1

    # Ends of pieces of work -----------------------------------------------------------------

    def _run(self, job: int, request: SampledRequest) -> None:
        heappush(self._running, (self._iteration + request.output_tokens - 1, job, request))
        self._context += request.prompt_tokens

    def _end_decodes(self, now: float) -> list[int]:
        self._iteration += self._count
        self._context += self._count * len(self._running)
        left = []
        while self._running and self._running[0][0] <= self._iteration:
            _, job, request = heappop(self._running)
            self._context -= request.prompt_tokens + request.output_tokens - 1
            self._leave(job, request, now)
            left.append(job)
        return left

    def _end_prefills(self, now: float) -> list[int]:
        left = []
        for job, request in self._prefilled:
            self._log.first_token[job] = now
            self._prefilling -= request.prompt_tokens
            if self._decodes and request.output_tokens > 1:
                self._run(job, request)
            else:
                self._leave(job, request, now)
                left.append(job)
        self._prefilled.clear()
        return left

    def _leave(self, job: int, request: SampledRequest, now: float) -> None:
        self._reserved -= self._needs(request)
        self._work_s -= self._decode_work_s(request)
        if self._decodes:
            self._log.last_token[job] = now

    # Estimates for the router ---------------------------------------------------------------

    def _prefill_work_s(self, request: SampledRequest) -> float:
        return isolated_prefill_s(self._station, request) if self._weighs and self._prefills else 0.0

    def _decode_work_s(self, request: SampledRequest) -> float:
        if not self._weighs or not self._decodes:
            return 0.0
        batch = max(min(self._station.max_batch, self._station.kv_tokens // self._needs(request)), 1)
        return (request.output_tokens - 1) * self._decode_step_s(batch) / batch
