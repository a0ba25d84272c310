"""A few tiers keep all the promises that ways ask for."""

from __future__ import annotations

from itertools import pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.candidates.latency_tiers import MOST, chain, how_many

BOUNDS = st.floats(0.01, 100) | st.just(inf)


@given(st.lists(st.tuples(BOUNDS, BOUNDS), min_size=1, max_size=20))
def test_every_pair_has_a_tier_that_keeps_it(wanted: list[tuple[float, float]]) -> None:
    tiers = chain(wanted)
    assert len(tiers.tiers) <= MOST
    for seconds, tpot_s in wanted:
        tier = tiers.at_most(seconds, tpot_s)
        assert tier.seconds <= seconds
        assert tier.tpot_s <= tpot_s


@given(st.lists(st.tuples(BOUNDS, BOUNDS), min_size=1, max_size=20))
def test_a_tighter_tier_keeps_what_looser_ones_promise(wanted: list[tuple[float, float]]) -> None:
    tiers = chain(wanted).tiers
    for tight, loose in pairwise(tiers):
        assert tight.value < loose.value
        assert tight.seconds <= loose.seconds
        assert tight.tpot_s <= loose.tpot_s


def test_near_bounds_are_merged_first() -> None:
    tiers = chain([(0.1, inf), (1.0, inf), (1.1, inf), (5.0, inf), (30.0, inf)]).tiers
    assert [t.seconds for t in tiers] == [0.1, 1.0, 5.0, 30.0]


def test_large_problems_have_fewer_tiers() -> None:
    assert how_many(3, 3) == MOST
    assert how_many(26, 6) == 2
