"""A few tiers keep all the promises that request paths ask for."""

from __future__ import annotations

from itertools import pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.candidates.latency_tiers import MAX_TIERS, tier_chain, tiers_per_service

BOUNDS = st.floats(0.01, 100) | st.just(inf)


@given(st.lists(st.tuples(BOUNDS, BOUNDS), min_size=1, max_size=20))
def test_latency_tiers_every_wanted_pair_has_tier_within_bounds(wanted: list[tuple[float, float]]) -> None:
    tiers = tier_chain(wanted)
    assert len(tiers.tiers) <= MAX_TIERS
    for seconds, tpot_s in wanted:
        tier = tiers.loosest_within(seconds, tpot_s)
        assert tier.seconds <= seconds
        assert tier.tpot_s <= tpot_s


@given(st.lists(st.tuples(BOUNDS, BOUNDS), min_size=1, max_size=20))
def test_latency_tiers_tighter_tier_keeps_bounds_of_looser(wanted: list[tuple[float, float]]) -> None:
    tiers = tier_chain(wanted).tiers
    for tight, loose in pairwise(tiers):
        assert tight.value < loose.value
        assert tight.seconds <= loose.seconds
        assert tight.tpot_s <= loose.tpot_s


def test_latency_tiers_too_many_bounds_merge_nearest() -> None:
    tiers = tier_chain([(0.1, inf), (1.0, inf), (1.1, inf), (5.0, inf), (30.0, inf)]).tiers
    assert [t.seconds for t in tiers] == [0.1, 1.0, 5.0, 30.0]


def test_latency_tiers_large_problem_has_fewer_tiers() -> None:
    assert tiers_per_service(3, 3) == MAX_TIERS
    assert tiers_per_service(26, 6) == 2
