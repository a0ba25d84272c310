"""State of one replica under a steady rate of requests of one class, computed with closed forms.

Work that occurs once per request (encode, prefill, generate) occupies the replica, and decoding requests
share the remaining time. The state is a fixed point: the more requests decode, the slower each request
becomes, and the more prompts wait, the more prompts an iteration contains. Attention-DP groups run iterations
in lockstep, so prompts of several groups share an iteration.

Waits in queues are computed with the formulas of Erlang, Allen-Cunneen and Mitzenmacher. Rates are per
second, times are in seconds, and cv2 is a squared coefficient of variation (1 for an exponential
distribution). The functions for waits raise ValueError if the queue is overloaded, because the wait is then
infinite.

Closed forms evaluate a class at hundreds of cells, so they use arrays. The times of isolated samples are
equal to the simulator's times (`stations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.stations import Station, encode_batches_s

Floats = NDArray[np.float64]
_T = TypeVar("_T", float, Floats)
_MAX_STEPS: Final = 24
"""Maximum number of steps to find the fixed point. A replica that needs more steps is almost overloaded, and
would miss the bounds anyway."""
_MAX_BUSY_SHARE: Final = 0.999


@dataclass(frozen=True)
class AnalyticState:
    """State of one replica. Times are in seconds, and arrays have one entry per sample."""

    service_s: Floats
    """Time in which the replica does the work that occurs once per request."""
    own_s: Floats
    """Time from the end of the wait to the first token, or until the request leaves a station without
    prefill."""
    token_s: float = 0.0
    """Time of an iteration that only decodes, for the mean number of requests plus some standard
    deviations."""
    tpot_mean: float = 0.0
    interruptions: Floats | None = None
    """Mean number of iterations with prompts of other requests while a request decodes."""
    interruption_s: float = 0.0
    """Time that an iteration with prompts of other requests adds."""
    steps: Floats | None = None
    """Number of iterations in which a request decodes."""

    def share_slower_than(self, tpot_s: Floats) -> float:
        """Return the share of requests whose time per token exceeds their entry in `tpot_s`."""
        if self.steps is None:
            return 0.0
        many = self.steps > 0
        steps = self.steps[many]
        if not steps.size:
            return 0.0
        spare = (tpot_s[many] - self.token_s * (1 + 0.5 / steps)) * steps
        if self.interruptions is None or self.interruption_s <= 0:
            return float(np.mean(spare < 0))
        allowed = np.floor(spare / self.interruption_s)
        return float(np.mean(_poisson_exceeds(self.interruptions[many], allowed)))


def _poisson_exceeds(mean: Floats, count: Floats) -> Floats:
    """Return P(Poisson(mean) > count) with Wilson and Hilferty's approximation, or 1 for a negative count."""
    k = np.maximum(count, 0.0) + 1
    x = ((mean / k) ** (1 / 3) - 1 + 1 / (9 * k)) * 3 * np.sqrt(k)
    return np.where(count < 0, 1.0, _normal_cdf(x))


def _normal_cdf(x: Floats) -> Floats:
    """Return the normal distribution function with an error of 3e-4, which is sufficient for screening."""
    below: Floats = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return below


@dataclass(frozen=True, eq=False)
class RequestCosts:
    """Sizes of a class's sampled requests, as arrays with one entry per sample."""

    samples: tuple[SampledRequest, ...]
    prompts: Floats
    computed: Floats
    outputs: Floats
    patches: Floats
    """Number of patches of all items of a sample."""
    units: Floats
    idle_ttft: Floats
    """TTFT on the idle replica in seconds, or NaN if the class's SLO bounds no slowdown."""
    idle_tpot: Floats


@lru_cache(maxsize=512)
def request_costs(samples: tuple[SampledRequest, ...]) -> RequestCosts:
    return RequestCosts(
        samples,
        np.array([float(d.prompt_tokens) for d in samples]),
        np.array([float(d.computed_tokens) for d in samples]),
        np.array([float(d.output_tokens) for d in samples]),
        np.array([float(sum(d.patches)) for d in samples]),
        np.array([d.units for d in samples]),
        np.array([d.idle.ttft_s if d.idle else np.nan for d in samples]),
        np.array([d.idle.tpot_s if d.idle else np.nan for d in samples]),
    )


def encode_s(sizes: RequestCosts, station: Station) -> Floats:
    if station.encode is None or "E" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    if sizes.patches.max() > station.max_patches:
        # Items are not split, so the number of batches depends on the order of the items.
        return np.array([encode_batches_s(station, d.patches) for d in sizes.samples])
    return np.where(sizes.patches > 0, station.encode.evaluate(sizes.patches), 0.0)


def prefill_s(sizes: RequestCosts, station: Station) -> Floats:
    if station.steps is None or "P" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    prefill = station.steps.isolated_prefill
    if not station.chunked:
        return prefill.evaluate(sizes.computed)
    whole, rest = np.divmod(sizes.computed, float(station.chunk_tokens))
    isolated: Floats = whole * prefill(station.chunk_tokens) + np.where(rest > 0, prefill.evaluate(rest), 0.0)
    return isolated


def decode_s(sizes: RequestCosts, station: Station) -> Floats:
    """Return the time of each request's decode iterations after the first token, in seconds."""
    if station.steps is None or "D" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    steps = np.maximum(sizes.outputs - 1, 0.0)
    context = steps * (sizes.prompts + (steps - 1) / 2)
    isolated: Floats = steps * station.steps.decode(1) + station.steps.kv_token_s * context
    return isolated


def generate_s(sizes: RequestCosts, station: Station) -> Floats:
    return np.zeros_like(sizes.units) if station.generate is None else station.generate.evaluate(sizes.units)


@dataclass(frozen=True)
class _Balance:
    """Mean values of a replica's state at a constant request rate."""

    decoding: float
    """Number of decoding requests."""
    fill: float
    """Fill level of iterations with waiting requests, from 0 (one request per iteration) to 1 (full)."""
    service_s: float
    iterations: float
    """Number of iterations per request that contain a part of its prompt."""
    pace: float
    """Number of tokens per second that one decoding request generates."""
    shared: SharedIterations | None = None
    """Iterations that attention-DP groups share, or None if there is only one group."""


class ReplicaLoad:
    """Times of the sampled requests of a class on one replica of a station."""

    def __init__(self, station: Station, costs: RequestCosts, sigmas: float) -> None:
        """Compute the times that do not depend on the rate.

        `sigmas` is the safety margin of the KV cache and the batch, in standard deviations: the mean number
        of requests plus this margin must fit.
        """
        self._station = station
        # A router that takes the load into account balances decoding, so fluctuations are averaged over all
        # replicas.
        self._margin = sigmas / (station.groups if station.router == "random" else station.schedulers) ** 0.5
        decodes, prefills = "D" in station.tasks, "P" in station.tasks
        self._encode = encode_s(costs, station)
        self._isolated_s = self._encode + prefill_s(costs, station)
        self._isolated_decode = decode_s(costs, station)
        self._generate = generate_s(costs, station)
        self._size = costs.patches if station.tasks == "E" else costs.computed
        self._decode_steps = np.maximum(costs.outputs - 1, 0.0) if decodes else np.zeros_like(costs.outputs)
        self._kv_tokens = costs.prompts + costs.outputs if decodes else costs.prompts
        most = station.max_patches if station.tasks == "E" else station.chunk_tokens
        self._mean_size = max(float(self._size.mean()), 1e-9)
        self._max_size = max(float(most), self._mean_size)
        self._packed_s = self._packed_times()
        self._own_iterations = (
            np.ceil(self._size / station.chunk_tokens) if prefills else np.zeros_like(self._size)
        )
        self._packed_iterations = self._size / station.chunk_tokens if prefills else self._own_iterations
        self._means = tuple(
            float(x.mean())
            for x in (self._isolated_s, self._packed_s, self._own_iterations, self._packed_iterations)
        )
        self._mean_steps = float(self._decode_steps.mean())
        self._context = self._mean_context(costs.prompts)
        self.isolated_latency_s = float((self._isolated_s + self._isolated_decode + self._generate).mean())
        """Mean time in seconds of a request that runs alone."""

    def state_at(self, rate: float) -> AnalyticState | None:
        """Return the replica's state at `rate` requests per second, or None if the replica is overloaded."""
        if "G" in self._station.tasks:
            return self._serial(rate)
        return self._engine(rate) if "D" in self._station.tasks else self._batches(rate)

    # Kinds of replica -----------------------------------------------------------------------

    def _serial(self, rate: float) -> AnalyticState | None:
        """Return the state of a replica that serves one request after another."""
        service = self._isolated_s + self._isolated_decode + self._generate
        if rate * service.mean() >= 1:
            return None
        own = self._isolated_s + self._overhead_s if "P" in self._station.tasks else service
        if not self._mean_steps:
            return AnalyticState(service, own)
        token_s = float(self._isolated_decode.sum() / self._decode_steps.sum())
        return AnalyticState(service, own, token_s, token_s, steps=self._decode_steps)

    def _batches(self, rate: float) -> AnalyticState | None:
        """Return the state of a replica that only prefills or encodes."""
        isolated_latency_s, packed_s, _, _ = self._means
        fill = self._fill(rate, isolated_latency_s, packed_s)
        if fill is None:
            return None
        service = _interpolate(self._isolated_s, self._packed_s, fill)
        if "P" in self._station.tasks and rate * (self._kv_tokens * service).mean() > self._station.kv_tokens:
            return None
        return AnalyticState(service, self._own_times(service, fill, 0.0))

    def _engine(self, rate: float) -> AnalyticState | None:
        """Return the state of a replica that decodes, with or without prefill in the same iterations."""
        balance = self._balance(rate)
        if balance is None or not self._fits(rate, balance):
            return None
        token_s, fill = self._token_s(balance.decoding), balance.fill
        service = _interpolate(
            self._time_with_decoding(self._isolated_s, self._own_iterations, balance.decoding, token_s),
            self._time_with_decoding(self._packed_s, self._packed_iterations, balance.decoding, token_s),
            fill,
        )
        wait_s = token_s
        if balance.shared is not None:
            service = service * balance.shared.duration_ratio
            wait_s += balance.shared.busy * (float(service.mean()) - token_s)
        if rate * service.mean() >= 1:
            return None
        lifetimes = self._decode_steps / balance.pace
        decoding_s = self._token_s(balance.decoding + self._margin * balance.decoding**0.5)
        if not balance.iterations:
            own = lifetimes + token_s / 2
            return AnalyticState(service, own, decoding_s, 1 / balance.pace, steps=self._decode_steps)
        count, each_s = self._interruptions(service, balance, token_s)
        return AnalyticState(
            service_s=service,
            own_s=self._own_times(service, fill, wait_s),
            token_s=decoding_s,
            tpot_mean=1 / balance.pace,
            interruptions=count * (rate * lifetimes + self._waiting_prompts(rate, service)),
            interruption_s=each_s,
            steps=self._decode_steps,
        )

    def _interruptions(self, service: Floats, balance: _Balance, token_s: float) -> tuple[float, float]:
        """Return the number of iterations with prompts per prompt, and the time that each iteration adds.

        These iterations interrupt decoding requests. Prompts differ in length, so the total added time is
        compound Poisson distributed. The variance is the same as for fewer, longer prompts of the length
        E[S^2] / E[S].
        """
        mean_s = float(service.mean())
        variable = float((service**2).mean()) / mean_s**2
        longer = max(mean_s - balance.iterations * token_s, 0.0)
        if balance.shared is None:
            return 1 / variable, longer * variable
        return self._station.groups / balance.shared.mean_groups / variable, longer * variable

    def _waiting_prompts(self, rate: float, service: Floats) -> float:
        """Return the number of prompts that wait at one replica when a prompt's prefill ends.

        These prompts are computed next, and interrupt the request's decoding.
        """
        mean_s = float(service.mean())
        station = self._station
        servers = station.groups if station.router == "random" else station.schedulers
        wait_s = wait_mean(servers, servers * rate, mean_s, service_cv2=float(service.var()) / mean_s**2)
        return rate * wait_s

    # Means of a steady state ----------------------------------------------------------------

    def _balance(self, rate: float) -> _Balance | None:
        """Return the steady state, or None if the replica is overloaded.

        The number of decoding requests is a fixed point of Little's law (rate x time). The search begins at
        0.
        """
        found, decoding = self._steady_state_with(rate, 0.0), 0.0
        for _ in range(_MAX_STEPS):
            if found is None or decoding > 1.5 * self._station.max_batch:
                return None
            now = rate * self._mean_steps / found.pace
            if abs(now - decoding) <= 2e-3 * now:
                return found
            decoding = now
            found = self._steady_state_with(rate, decoding)
        return found

    def _steady_state_with(self, rate: float, decoding: float) -> _Balance | None:
        """Return the mean values if `decoding` requests decode, or None if prompts overload the replica."""
        token_s = self._token_s(decoding)
        if "P" not in self._station.tasks:
            return _Balance(decoding, 0.0, 0.0, 0.0, 1 / token_s)
        isolated_latency_s, packed_s, own, shared = self._means
        isolated_latency_s = self._time_with_decoding(isolated_latency_s, own, decoding, token_s)
        packed_s = self._time_with_decoding(packed_s, shared, decoding, token_s)
        fill = self._fill(rate, isolated_latency_s, packed_s)
        if fill is None:
            return None
        service_s, iterations = (
            _interpolate(isolated_latency_s, packed_s, fill),
            _interpolate(own, shared, fill),
        )
        pace = (1 - rate * service_s) / token_s + rate * iterations
        if self._station.groups == 1:
            return _Balance(decoding, fill, service_s, iterations, pace)
        groups = self._station.groups
        in_step = shared_iterations(rate * service_s, groups, self._all_groups_ratio)
        pace = (1 - in_step.busy) / token_s + groups * rate * iterations / in_step.mean_groups
        return _Balance(decoding, fill, service_s, iterations, pace, in_step)

    def _fill(self, rate: float, isolated_latency_s: float, packed_s: float) -> float | None:
        """Return how full iterations are (`_Balance.fill`), or None if the replica is overloaded even with
        full iterations.

        A server at utilisation u has u^2 / (1 - u) waiting requests, which join the next iteration. If j
        requests share an iteration, each request takes 1 / j of the shared cost, and saves 1 - 1 / j of it.
        """
        most = self._max_size / self._mean_size
        saved = 1 - 1 / most
        if saved <= 0:
            return 0.0 if rate * isolated_latency_s < 1 else None
        fill = 1.0
        for _ in range(_MAX_STEPS):
            busy = rate * _interpolate(isolated_latency_s, packed_s, fill)
            if busy >= 1:
                if fill == 1.0:
                    return None
                fill = (fill + 1) / 2
                continue
            batched = min(1 + busy * busy / (1 - busy), most)
            now = (1 - 1 / batched) / saved
            if abs(now - fill) < 2e-3:
                break
            fill = (fill + now) / 2
        return fill

    def _time_with_decoding(self, service: _T, iterations: _T, decoding: float, token_s: float) -> _T:
        """Return the time of iterations with prompts, including the requests that decode in these
        iterations."""
        steps = self._station.steps
        if steps is None or "P" not in self._station.tasks:
            return service
        per_token = 2 * (steps.prefill(self._max_size) - steps.prefill(self._max_size / 2)) / self._max_size
        mixed = 1 + (steps.mixed_factor - 1) * min(decoding, 1.0)
        with_them = service + iterations * decoding * per_token
        # This is the maximum of both times, in a form for floats and arrays.
        return (with_them + iterations * token_s + abs(with_them - iterations * token_s)) * (mixed / 2)

    def _fits(self, rate: float, balance: _Balance) -> bool:
        """Return whether the requests and their KV tokens fit, with a margin of some standard deviations."""
        if balance.decoding + self._margin * balance.decoding**0.5 > self._station.max_batch:
            return False
        seconds = balance.service_s + self._decode_steps / balance.pace
        mean = rate * float((self._kv_tokens * seconds).mean())
        variance = rate * float((self._kv_tokens**2 * seconds).mean())
        return bool(mean + self._margin * variance**0.5 <= self._station.kv_tokens)

    # Parts ----------------------------------------------------------------------------------

    @property
    def _all_groups_ratio(self) -> float:
        """Duration of an iteration with a mean prompt in every attention-DP group, relative to a single
        prompt."""
        steps = self._station.steps
        assert steps is not None
        tokens = min(self._mean_size, self._max_size)
        return steps.prefill(tokens) / steps.isolated_prefill(tokens)

    @property
    def _overhead_s(self) -> float:
        steps = self._station.steps
        return steps.request_overhead_s if steps is not None and "P" in self._station.tasks else 0.0

    def _own_times(self, service: Floats, fill: float, token_s: float) -> Floats:
        """Return each request's own time: its iterations, and then the rest of the pipeline.

        The iterations may be shared with other requests.
        """
        batched = 1 / (1 - fill * (1 - self._mean_size / self._max_size))
        # Requests that share an iteration leave at its end. Compared with one after another, this is later by
        # half of the other requests' parts on average.
        others_s = (batched - 1) / 2 * float(service.mean())
        own: Floats = service + others_s + token_s / 2 + self._overhead_s
        steps = self._station.steps
        if steps is not None and steps.pipeline > 1:
            chunk = self._station.chunk_tokens
            own = own + (steps.pipeline - 1) * steps.prefill.evaluate(np.minimum(self._size, chunk))
        return own

    def _packed_times(self) -> Floats:
        """Return each request's service time in full iterations, which is its share of their time."""
        station = self._station
        if station.tasks == "E" and station.encode is not None:
            return self._size * (station.encode(self._max_size) / self._max_size)
        if station.steps is None or "P" not in station.tasks:
            return self._isolated_s
        packed: Floats = self._size * (station.steps.prefill(self._max_size) / self._max_size) + self._encode
        return packed

    def _mean_context(self, prompts: Floats) -> float:
        """Return the mean number of context tokens of a decoding request, over its decoding time."""
        total = self._decode_steps.sum()
        return (
            float(((prompts + self._decode_steps / 2) * self._decode_steps).sum() / total) if total else 0.0
        )

    def _token_s(self, decoding: float) -> float:
        """Return the time in seconds of an iteration in which `decoding` requests decode and nothing else
        runs."""
        steps = self._station.steps
        assert steps is not None
        many = max(decoding, 1.0)
        return max(steps.decode(many) + steps.kv_token_s * many * self._context, 1e-9)


def _interpolate(low: _T, high: _T, share: float) -> _T:
    return low + share * (high - low)


@dataclass(frozen=True)
class SharedIterations:
    """Iterations with prompts, in all groups of a replica."""

    busy: float
    """Share of the time in which iterations contain prompts."""
    mean_groups: float
    """Mean number of groups with a prompt in an iteration."""
    duration_ratio: float
    """Duration of an iteration, relative to an iteration with a single prompt."""


def shared_iterations(busy_alone: float, groups: int, all_groups_ratio: float) -> SharedIterations:
    """Return the mean number of groups whose prompts share an iteration, and related values.

    Prompts that arrive at any group during an iteration join the next iteration: a server at utilisation u
    has u^2 / (1 - u) waiting requests. Prompts that share an iteration take less time than separate
    iterations.

    Args:
        busy_alone: Share of the time that the prompts of one group would take without the other groups.
        groups: Number of groups.
        all_groups_ratio: Duration of an iteration with prompts of all groups, relative to a single prompt.
    """
    if groups == 1:
        return SharedIterations(busy_alone, 1.0, 1.0)
    together, longer, busy = 1.0, 1.0, 0.0
    for _ in range(_MAX_STEPS):
        longer = 1 + (together - 1) / (groups - 1) * (all_groups_ratio - 1)
        busy = min(groups * busy_alone * longer / together, _MAX_BUSY_SHARE)
        now = min(1 + busy * busy / (1 - busy), groups)
        if abs(now - together) < 1e-3:
            break
        together = (together + now) / 2
    return SharedIterations(busy, together, longer)


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request waits in M/M/c.

    `load` is the arrival rate x service time (erlangs). Source: Erlang's C formula, computed with the
    recursion of the B formula, which never overflows.
    """
    _refuse_overload(servers, load)
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_mean(
    servers: int, rate: float, service_s: float, *, arrival_cv2: float = 1.0, service_cv2: float = 1.0
) -> float:
    """Return the mean wait in GI/G/c in seconds.

    Source: Allen-Cunneen: W_q(M/M/c) x (c_a^2 + c_s^2) / 2.
    """
    waits = erlang_c(servers, rate * service_s)
    return waits / (servers / service_s - rate) * (arrival_cv2 + service_cv2) / 2


def power_of_two_wait(utilisation: float) -> tuple[float, float]:
    """Return (share of requests that wait, mean wait of all requests in units of the service time).

    Each request joins the shorter of two random queues. Source: the supermarket model of M/M/1 queues
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001): a share u^(2^k - 1) of many
    queues has k or more requests. With few queues, waits are shorter.
    """
    _refuse_overload(1, utilisation)
    wait, k = 0.0, 2
    while (longer := utilisation ** (2**k - 2)) > 1e-6:
        wait, k = wait + longer, k + 1
    return utilisation**2, wait


def _refuse_overload(servers: int, load: float) -> None:
    if servers < 1 or not 0 <= load < servers:
        raise ValueError(f"{load:g} erlangs need more than {load:g} servers; there are {servers}")
