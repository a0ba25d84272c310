"""Request classes, which are the demands on the pool, and the sizes of one sampled request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cornplug.planner.inputs.schema import Application, RequestSpec, Slo
from cornplug.planner.inputs.slo import IdleTimes, PercentileBounds


@dataclass(frozen=True)
class RequestClass:
    """Request class: the requests of an application that one of its `requests` tables describes."""

    app: Application
    request: RequestSpec

    @property
    def name(self) -> str:
        """Name of the demand: "application/request"."""
        return f"{self.app.name}/{self.request.name}"

    @property
    def slo(self) -> Slo:
        """Latency targets of the class. For a job without a bound on the E2E time, the targets include a
        bound for the last responses."""
        slo, job = self.request.slo or self.app.slo, self.request.job
        if job is None or slo.all_bounds("e2e"):
            return slo
        last = PercentileBounds(percentile="p99", e2e_s=job.last_response_s)
        return slo.model_copy(update={"also": [*slo.also, last]})

    @property
    def rate(self) -> float:
        """Requests per second that the plan must carry."""
        return self.request.rate * self.request.peak

    @property
    def has_hourly_rates(self) -> bool:
        """Whether the input has a rate for each hour of the day."""
        return self.request.rate_by_hour is not None

    def share_at(self, hour: int) -> float:
        """Return the rate in an hour of the day as a fraction of `rate`, or 1 if the input has a single rate.

        If an observed rate replaces the input's rate, all hours scale with it.
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
    """Sampled requests of a class. The hash is computed only once, because the samples are part of the key
    for cached capacities."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """Sizes of one request, drawn from its class's distributions."""

    prompt_tokens: int
    """Number of all prompt tokens: text, shared prefix and media."""
    cached_tokens: int
    """Number of prompt tokens whose KV is in a cache."""
    patches: tuple[int, ...]
    """Number of patches of each media item that must be encoded. Items whose embedding is cached are
    omitted."""
    output_tokens: int
    """Number of generated tokens. At least 1, because prefill generates the first token."""
    units: float
    """Units of work for a generator, or 0 if the request needs none."""
    idle: IdleTimes | None = None
    """Times of the request if it runs alone on the reference replica, or None if the class's SLO bounds no
    slowdown."""

    @property
    def computed_tokens(self) -> int:
        """Number of prompt tokens that prefill computes. At least 1, because the engines always compute the
        last token."""
        return max(self.prompt_tokens - self.cached_tokens, 1)
