"""Waits in queues by Erlang, Allen-Cunneen and Mitzenmacher, used to screen cells before simulation.

Rates are per second, times are in seconds, and cv2 is a squared coefficient of variation (1 for an
exponential distribution). The functions raise ValueError if a queue is overloaded, because its wait is not
finite.
"""

from __future__ import annotations


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


def two_choices(utilisation: float) -> tuple[float, float]:
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
