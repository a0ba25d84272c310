"""Erlang's, Allen and Cunneen's and Mitzenmacher's waits, by which a cell is screened before it is simulated.

Rates are per second, times seconds, cv2 squared coefficients of variation (1: exponential).
An overloaded queue has no wait: both functions raise ValueError, which names the rate it carries.
"""

from __future__ import annotations


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c. `load`: arrival rate x service time (erlangs).

    Source: Erlang's C formula, by the recursion of his B formula, which never overflows.
    """
    _refuse_overload(servers, load)
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_mean(
    servers: int, rate: float, service_s: float, *, arrival_cv2: float = 1.0, service_cv2: float = 1.0
) -> float:
    """Mean wait in GI/G/c, seconds.

    Source: Allen-Cunneen: W_q(M/M/c) x (c_a^2 + c_s^2) / 2.
    """
    waits = erlang_c(servers, rate * service_s)
    return waits / (servers / service_s - rate) * (arrival_cv2 + service_cv2) / 2


def two_choices(utilisation: float) -> tuple[float, float]:
    """Share of arrivals that wait, and the mean wait of all in service times, where each takes the shorter of
    two random queues.

    Source: the supermarket model, M/M/1 queues (Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", 2001): a share u^(2^k - 1) of the queues has k requests or more. It is of many queues; with
    few of them waits are shorter.
    """
    _refuse_overload(1, utilisation)
    wait, k = 0.0, 2
    while (longer := utilisation ** (2**k - 2)) > 1e-6:
        wait, k = wait + longer, k + 1
    return utilisation**2, wait


def _refuse_overload(servers: int, load: float) -> None:
    if servers < 1 or not 0 <= load < servers:
        raise ValueError(f"{load:g} erlangs need more than {load:g} servers; there are {servers}")
