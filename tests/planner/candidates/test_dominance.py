"""Pruning drops what is needless, and never changes what the best plan costs."""

from __future__ import annotations

from cornplug.planner.candidates.cells import loosest_variants
from cornplug.planner.optimizer.optimization_problem import PathVariant, ServiceDemand


def variant(name: str, *tiers: float, work: float = 1.0) -> PathVariant:
    needs = tuple(ServiceDemand(service, tier, work) for service, tier in zip("EP", tiers, strict=True))
    return PathVariant(name, "chat/text", "E+PD", needs)


def names(*variants: PathVariant) -> set[str]:
    return {v.name for v in loosest_variants(variants)}


def test_dominance_variant_tighter_in_one_stage_is_dropped() -> None:
    assert names(variant("tight", 0.3, 0.5), variant("loose", 0.5, 0.5)) == {"loose"}


def test_variants_that_trade_one_stage_for_the_other_stay() -> None:
    assert names(variant("a", 0.3, 0.7), variant("b", 0.5, 0.5)) == {"a", "b"}


def test_dominance_equal_variants_keep_one() -> None:
    assert len(names(variant("a", 0.3, 0.7), variant("b", 0.3, 0.7))) == 1


def test_dominance_less_work_within_tighter_bounds_is_kept() -> None:
    assert names(variant("cached", 0.3, 0.5, work=0.4), variant("plain", 0.5, 0.5)) == {"cached", "plain"}
