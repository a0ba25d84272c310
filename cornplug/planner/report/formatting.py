"""Text for a plan's numbers on the terminal, in the report and in messages, and checks of its SLOs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from cornplug.planner.plan import (
    JobForecast,
    LatencyForecast,
    OptimalityProof,
    Parallelism,
    Plan,
    PlannedGroup,
)

NO_VALUE = "–"


def format_dollars(per_hour: float | None) -> str:
    """Format dollars per hour, such as "$4.68/h"."""
    return NO_VALUE if per_hour is None else f"${per_hour:,.2f}/h"


def format_seconds(value: float | None) -> str:
    """Format a time with three digits, such as "85 ms" or "1.24 s"."""
    if value is None or math.isnan(value):
        return NO_VALUE
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def format_time_or_slowdown(value: float | None, *, slowdown: bool) -> str:
    """Format a time in seconds, or with `slowdown` a factor such as "2.5x"."""
    if not slowdown:
        return format_seconds(value)
    return NO_VALUE if value is None else f"{value:.3g}x"


def describe_job(forecast: JobForecast) -> str:
    """Describe a job, as in "500,000 requests in 7.9 h of 8 h, for $62.40"."""
    done = "" if forecast.done_hours is None else f" in {forecast.done_hours:.3g} h"
    return (
        f"{forecast.requests:,} requests{done} of {forecast.deadline_hours:g} h, for ${forecast.dollars:,.2f}"
    )


def format_percent(share: float | None) -> str:
    """Format a fraction in percent, such as "73 %" or "0.4 %"."""
    if share is None:
        return NO_VALUE
    part = 100 * share
    return f"{part:.0f} %" if part >= 10 or part == 0 else f"{part:.2g} %"


def format_percentile(name: str) -> str:
    """Return the name of a percentile as it is printed, such as "mean" or "P95"."""
    return name if name == "mean" else name.upper()


def format_rate(per_second: float) -> str:
    return f"{per_second:.3g}/s"


def format_count(n: int, noun: str) -> str:
    """Format a number with a noun, such as "1 replica" or "2 replicas"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def describe_proof(optimality: OptimalityProof) -> str:
    """Describe how good a plan is. The text contains "optimal" only if the solver proved this."""
    if optimality.status == "optimal":
        to = "" if optimality.gap < 1e-6 else f" to {format_percent(optimality.gap)}"
        return f"optimal (proved{to})"
    bound = f"{optimality.bound:.4g} {optimality.unit}".rstrip()
    ended = ", stopped by the time limit" if optimality.timed_out else ""
    gap = format_percent(optimality.gap)
    return f"feasible, gap {gap}{ended}: a better plan may exist, but none beyond {bound}"


def format_shape(parallelism: Parallelism, share: float) -> str:
    """Describe the GPUs of one replica, as in "1/4 GPU", "TP4", "TP8·PP2", "TP1·DP8", "TP8·DCP8" or
    "TP1·PCP8"."""
    if share < 1:
        return f"1/{round(1 / share)} GPU"
    degrees = {"PP": parallelism.pp, "DP": parallelism.dp, "PCP": parallelism.pcp, "DCP": parallelism.dcp}
    return f"TP{parallelism.tp}" + "".join(f"·{name}{n}" for name, n in degrees.items() if n > 1)


def profile_origin(profile: str) -> str:
    """Return the origin of a profile's times: "measured", "given" (in the input), or "ESTIMATE" (computed
    from the GPU table)."""
    if profile.startswith("roofline"):
        return "ESTIMATE"
    return "measured" if profile.startswith("measured") else "given"


def format_replicas(group: PlannedGroup) -> str:
    """Format the number of replicas: "4", or "3+1" if one of them runs on GPUs that would otherwise be
    idle."""
    extra = group.extra_replicas
    return f"{group.replicas - extra}+{extra}" if extra else f"{group.replicas}"


def unneeded_gpu_notes(plan: Plan) -> list[str]:
    """Return sentences about GPUs that are paid for, but not needed for the SLOs: GPUs of extra replicas, and
    idle GPUs."""
    found = []
    if any(g.extra_replicas for g in plan.groups):
        found.append(
            "+: extra replicas on GPUs that would be idle. They cost nothing and are not needed for the SLOs."
        )
    for n in plan.nodes:
        if n.idle_gpus > 1e-6:
            of = f"{n.idle_gpus:g} of the {n.count * n.gpus} GPUs of {n.name}"
            found.append(f"{of} are paid for but idle, so they are free for other work.")
    return found


class DayPart(NamedTuple):
    """Consecutive hours that need the same machines."""

    hours: str
    """Hours in words, such as "00 to 07 h"."""
    needed: str
    """Machines that are needed in these hours, in words."""
    releasable: str
    """Machines that can be returned in these hours, in words."""
    cost_per_hour: float


def day_parts(plan: Plan) -> list[DayPart]:
    """Divide the plan's day into parts. Consecutive hours with the same machines are one part."""
    parts = []
    for _, same in groupby(plan.hours, key=lambda h: h.nodes):
        of = list(same)
        runs = {name: n for name, n in of[0].nodes.items() if n}
        back = {n.name: n.count - runs.get(n.name, 0) for n in plan.nodes if n.count > runs.get(n.name, 0)}
        hours = f"{of[0].hour:02d} to {of[-1].hour + 1:02d} h"
        parts.append(DayPart(hours, _machines(runs), _machines(back), of[0].cost_per_hour))
    return parts


def day_cost(plan: Plan) -> str:
    """Return a sentence about the plan's cost for a day."""
    day = sum(h.cost_per_hour for h in plan.hours)
    whole = plan.cost_per_hour * len(plan.hours)
    if whole - day < 0.005:
        return f"A day costs ${whole:,.2f}: every hour needs all machines."
    return f"A day costs ${day:,.2f} if idle machines are returned, or ${whole:,.2f} if all are kept."


def _machines(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} × {name}" for name, n in counts.items()) or NO_VALUE


def headline(plan: Plan) -> str:
    """Summarise the plan in one line: cost, goodput and nodes."""
    nodes = ", ".join(f"{n.count} × {n.name}" for n in plan.nodes if n.count)
    goodput = "" if plan.goodput is None else f", {format_rate(plan.goodput)} of goodput"
    return f"{format_dollars(plan.cost_per_hour)}{goodput}: {nodes or 'no nodes'}"


@dataclass(frozen=True)
class SloCheck:
    """Bound of a request class and the simulated time. Both are in seconds, or multiples of the time on an
    idle replica."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E, or the slowdown of one of them."""
    percentile: str
    bound: float | None
    """Bound, or None if the input sets no bound and only the simulated time is shown."""
    simulated: float | None
    """Simulated time, or None if it is unknown."""
    slowdown: bool = False
    """Whether both values are multiples of the time on an idle replica."""

    @property
    def is_met(self) -> bool | None:
        """Whether the simulated time is within the bound, or None if either value is None."""
        if self.bound is None or self.simulated is None:
            return None
        return self.simulated <= self.bound

    @property
    def name(self) -> str:
        """Name of the time that is checked, such as "TTFT P95"."""
        return f"{self.quantity} {format_percentile(self.percentile)}"

    @property
    def bound_text(self) -> str:
        return format_time_or_slowdown(self.bound, slowdown=self.slowdown)

    @property
    def simulated_text(self) -> str:
        return format_time_or_slowdown(self.simulated, slowdown=self.slowdown)


def slo_checks(plan: Plan) -> list[SloCheck]:
    """Return the checks of all request classes of a plan."""
    return [check for forecast in plan.latency_forecasts for check in _forecast_checks(forecast)]


def verdict(check: SloCheck) -> tuple[str, Literal["good", "bad", "soft"]]:
    """Return the result of a check in one or two words, and its style."""
    if check.is_met is None:
        return ("no bound" if check.bound is None else "unknown"), "soft"
    return ("kept", "good") if check.is_met else ("MISSED", "bad")


def _forecast_checks(forecast: LatencyForecast) -> Iterator[SloCheck]:
    """Yield a check for each bound. For each time without a bound, yield a check at the SLO's first
    percentile."""
    found = [b for b in forecast.bounds if b.bound is not None]
    quantities = {b.quantity for b in found}
    for b in forecast.bounds:
        unbounded = b.quantity not in quantities and b.percentile == forecast.slo_percentile
        if b.bound is not None or (unbounded and not b.slowdown and b.simulated is not None):
            quantities.add(b.quantity)
            quantity = b.quantity.upper() + (" slowdown" if b.slowdown else "")
            name = forecast.class_name
            yield SloCheck(name, quantity, b.percentile, b.bound, b.simulated, b.slowdown)
