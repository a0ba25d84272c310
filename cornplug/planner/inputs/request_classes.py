"""Request classes, which are the demands of the pool, and one request of a class as every model of its time
sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cornplug.planner.inputs.schema import Application, RequestSpec, Slo
from cornplug.planner.inputs.slo import IdleTimes, PercentileBounds


@dataclass(frozen=True)
class RequestClass:
    """An application's requests of one kind."""

    app: Application
    request: RequestSpec

    @property
    def name(self) -> str:
        """The demand's: "application/request"."""
        return f"{self.app.name}/{self.request.name}"

    @property
    def slo(self) -> Slo:
        """A job's last answers have a bound, too."""
        slo, job = self.request.slo or self.app.slo, self.request.job
        if job is None or slo.every("e2e"):
            return slo
        last = PercentileBounds(percentile="p99", e2e_s=job.last_answer_s)
        return slo.model_copy(update={"also": [*slo.also, last]})

    @property
    def rate(self) -> float:
        """Requests a second that are planned for."""
        return self.request.rate * self.request.peak

    @property
    def by_hour(self) -> bool:
        """Whether its rate is known by hours of the day."""
        return self.request.rate_by_hour is not None

    def share_at(self, hour: int) -> float:
        """The part of `rate` that an hour of the day brings; 1 where hours are not known.

        A rate that was observed in place of the input's scales the whole day.
        """
        hours = self.request.rate_by_hour
        return 1.0 if hours is None else hours[hour] / max(hours)

    @property
    def online(self) -> bool:
        return self.app.workload == "online"


def request_classes(applications: Iterable[Application]) -> dict[str, RequestClass]:
    """All request classes by name, in the order of the applications."""
    classes = [RequestClass(app, request) for app in applications for request in app.requests]
    return {c.name: c for c in classes}


class RequestSamples(tuple["SampledRequest", ...]):
    """Draws of a class. Their hash, by which capacities are remembered, is computed once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """Sizes of one request, drawn from its class's distributions."""

    prompt_tokens: int
    """All tokens of the prompt: text, shared prefix and media."""
    cached_tokens: int
    """Of these, tokens whose KV is in a cache."""
    patches: tuple[int, ...]
    """Patches of each item that must be encoded (the others' embeddings are cached)."""
    output_tokens: int
    """At least 1: the first token comes out of prefill."""
    units: float
    """Of a generator's work; 0 where there is none."""
    idle: IdleTimes | None = None
    """Where its class's SLO bounds a slowdown."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill computes: at least one, as the engines do."""
        return max(self.prompt_tokens - self.cached_tokens, 1)
