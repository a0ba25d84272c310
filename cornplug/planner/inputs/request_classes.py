"""Request classes, which are the demands of the pool, and the sizes of one sampled request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cornplug.planner.inputs.schema import Application, RequestSpec, Slo
from cornplug.planner.inputs.slo import IdleTimes, PercentileBounds


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind of an application."""

    app: Application
    request: RequestSpec

    @property
    def name(self) -> str:
        """Name of the demand: "application/request"."""
        return f"{self.app.name}/{self.request.name}"

    @property
    def slo(self) -> Slo:
        """Latency targets of the class. For a job they also bound the last responses."""
        slo, job = self.request.slo or self.app.slo, self.request.job
        if job is None or slo.every("e2e"):
            return slo
        last = PercentileBounds(percentile="p99", e2e_s=job.last_answer_s)
        return slo.model_copy(update={"also": [*slo.also, last]})

    @property
    def rate(self) -> float:
        """Requests per second that the plan must carry."""
        return self.request.rate * self.request.peak

    @property
    def by_hour(self) -> bool:
        """Whether the rate is given for each hour of the day."""
        return self.request.rate_by_hour is not None

    def share_at(self, hour: int) -> float:
        """Return the fraction of `rate` in an hour of the day, or 1 if the rate is not given by hour.

        An observed rate that replaces the input's rate scales the whole day.
        """
        hours = self.request.rate_by_hour
        return 1.0 if hours is None else hours[hour] / max(hours)

    @property
    def online(self) -> bool:
        return self.app.workload == "online"


def request_classes(applications: Iterable[Application]) -> dict[str, RequestClass]:
    """Return all request classes by name, in the order of the applications."""
    classes = [RequestClass(app, request) for app in applications for request in app.requests]
    return {c.name: c for c in classes}


class RequestSamples(tuple["SampledRequest", ...]):
    """Sampled requests of a class. Their hash, a key for computed capacities, is calculated once."""

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
    """Tokens of the prompt whose KV is in a cache."""
    patches: tuple[int, ...]
    """Patches of each item that must be encoded. Items with a cached embedding are omitted."""
    output_tokens: int
    """Tokens of the response. At least 1, because prefill generates the first token."""
    units: float
    """Units of a generator's work, or 0 without a generator."""
    idle: IdleTimes | None = None
    """Times on the reference replica, if the class's SLO bounds a slowdown."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill computes. At least one, as in the engines."""
        return max(self.prompt_tokens - self.cached_tokens, 1)
