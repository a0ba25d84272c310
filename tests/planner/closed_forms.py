"""Closed forms of queues that tests hold the simulator and the planner's cases against.

Rates are per second, times seconds, cv2 squared coefficients of variation (1: exponential).
Functions that have no answer for an overloaded queue raise ValueError and say what it carries.
"""

from __future__ import annotations

import math

from cornplug.planner.perf_model.analytic_load import erlang_c


def wait_exceeds(
    servers: int,
    rate: float,
    service_s: float,
    seconds: float,
    *,
    arrival_cv2: float = 1.0,
    service_cv2: float = 1.0,
) -> float:
    """Probability that the wait in GI/G/c is longer than `seconds`.

    Source: Erlang-C's exponential tail, its mean scaled as Allen-Cunneen's:
    C(c, a) exp(-2 (c/E[S] - rate) t / (c_a^2 + c_s^2)).
    """
    waits = erlang_c(servers, rate * service_s)
    spread = arrival_cv2 + service_cv2
    if spread <= 0:
        return 0.0
    return waits * math.exp(-2 * (servers / service_s - rate) * seconds / spread)


def wait_percentile(
    servers: int,
    rate: float,
    service_s: float,
    share: float,
    *,
    arrival_cv2: float = 1.0,
    service_cv2: float = 1.0,
) -> float:
    """Wait that a `share` (0.95: P95) of arrivals stay under, seconds; the inverse of `wait_exceeds`."""
    waits = erlang_c(servers, rate * service_s)
    if waits <= 1 - share:
        return 0.0
    spread = arrival_cv2 + service_cv2
    return math.log(waits / (1 - share)) * spread / (2 * (servers / service_s - rate))


def staffing(load: float, beta: float, *, arrival_cv2: float = 1.0, service_cv2: float = 1.0) -> int:
    """Servers for `load` erlangs: a + beta sqrt(a (c_a^2 + c_s^2) / 2), rounded up.

    beta about 1 for P90 and 2 for P99. Source: Halfin and Whitt 1981, spread as Allen-Cunneen's.
    """
    return math.ceil(load + beta * math.sqrt(load * (arrival_cv2 + service_cv2) / 2))


# One prefill server of constant service time, after DistServe (OSDI'24), section 3.1 -------


def ttft_single(service_s: float, rate: float) -> float:
    """Mean time to first token of M/D/1: D + R D^2 / 2(1 - RD)."""
    return ttft_pipeline(service_s, rate, stages=1)


def ttft_pipeline(service_s: float, rate: float, stages: int = 2) -> float:
    """Mean time to first token with PP: D + R D^2 / 2k(k - RD); a stage takes D/k, a request D."""
    if rate * service_s >= stages:
        raise ValueError(f"{rate:g}/s overload {stages} stages of {stages / service_s:g}/s")
    return service_s + rate * service_s**2 / (2 * stages * (stages - rate * service_s))


def ttft_tensor(service_s: float, rate: float, speedup: float) -> float:
    """Mean time to first token with TP that is `speedup` K times as fast: D/K + R D^2 / 2K(K - RD)."""
    if rate * service_s >= speedup:
        raise ValueError(f"{rate:g}/s overload a server of {speedup / service_s:g}/s")
    return service_s / speedup + rate * service_s**2 / (2 * speedup * (speedup - rate * service_s))


def crossover(speedup: float, stages: int = 2) -> float:
    """Rate x service time below which TP answers sooner than PP on as many GPUs, above which later.

    Found by bisection of ttft_tensor - ttft_pipeline, which changes its sign once in between.
    """
    if not 1 < speedup < stages:
        raise ValueError(f"a speed-up of {speedup:g} on {stages} GPUs: expected between 1 and {stages}")
    low, high = 0.0, speedup
    for _ in range(60):
        middle = (low + high) / 2
        if ttft_tensor(1.0, middle, speedup) < ttft_pipeline(1.0, middle, stages):
            low = middle
        else:
            high = middle
    return low


# Batches ------------------------------------------------------------------------------------


def batch_size(rate: float, base_s: float, item_s: float, largest: float) -> float:
    """Mean batch b = rate base / (1 - rate item) of a server whose batch takes base + item b.

    Its latency at moderate load is about 1.5 times that batch's time. The server is stable
    if rate < largest / (base + item largest). Source: fixed point b = rate T(b).
    """
    carried = largest / (base_s + item_s * largest)
    if rate >= carried:
        raise ValueError(f"{rate:g}/s overload a batch server of {carried:g}/s")
    return rate * base_s / (1 - rate * item_s)


def decode_batch(rate: float, output_tokens: float, base_s: float, request_s: float) -> float:
    """Requests that decode together: b = rate o base / (1 - rate o request).

    With iterations of base + request b seconds, which are the TPOT. Source: Little's law,
    b = rate o (base + request b).
    """
    tokens = rate * output_tokens
    if tokens * request_s >= 1:
        raise ValueError(f"{tokens:g} tokens/s overload a decoder of {1 / request_s:g} tokens/s")
    return tokens * base_s / (1 - tokens * request_s)


def kv_demand(rate: float, held_tokens: float, held_tokens_2: float, seconds: float) -> tuple[float, float]:
    """Mean and variance of the KV tokens in use, when a request holds its tokens for `seconds`.

    `held_tokens`, `held_tokens_2`: E[X T] / E[T] and E[X^2 T] / E[T] of tokens X held for time T,
    with seconds = E[T]. Source: M/G/infinity, whose requests in progress are Poisson, so the sum
    of their tokens is compound Poisson.
    """
    return rate * seconds * held_tokens, rate * seconds * held_tokens_2


def kv_replicas(mean: float, variance: float, tokens: float, sigmas: float = 2.0) -> int:
    """Replicas of `tokens` KV tokens each that hold mean + sigmas standard deviations."""
    return math.ceil((mean + sigmas * math.sqrt(variance)) / tokens)
