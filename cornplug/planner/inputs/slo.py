"""Service-level objectives of a request class: bounds on percentiles of its times."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from cornplug.planner.inputs.field_types import InputTable, Positive, wrong

Percentile = Literal["mean", "p50", "p90", "p95", "p99"]
Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("ttft", "tpot", "e2e")


class PercentileBounds(InputTable):
    """Bounds on one more percentile, in `also` of an SLO."""

    percentile: Percentile = "p95"
    """Of the requests, that must keep the bounds."""
    ttft_s: Positive | None = None
    """Seconds from arrival to the first token. Left out: no bound."""
    tpot_s: Positive | None = None
    """Seconds for each further token. Left out: no bound."""
    e2e_s: Positive | None = None
    """Seconds from arrival to the end of the answer. Left out: no bound."""

    def bound(self, quantity: Quantity) -> float | None:
        """Seconds; None: not bounded."""
        value: float | None = getattr(self, f"{quantity}_s")
        return value

    @property
    def quantities(self) -> list[Quantity]:
        """The bounded ones."""
        return [quantity for quantity in QUANTITIES if self.bound(quantity) is not None]

    def scaled(self, factor: float) -> Self:
        """The same with every bound times `factor`."""
        return self.model_copy(update={f"{q}_s": (self.bound(q) or 0.0) * factor for q in self.quantities})


class Slo(PercentileBounds):
    """Bounds on percentiles of the requests' times. An online application needs one bound at least."""

    also: list[PercentileBounds] = Field(default_factory=list)
    """Bounds on other percentiles, which a plan keeps, too:
    `also = [{ percentile = "p99", ttft_s = 3.0 }]`."""

    @property
    def tables(self) -> tuple[PercentileBounds, ...]:
        """All of its bounds; a percentile may have several tables, each with bounds on other times."""
        return (self, *self.also)

    @property
    def bounded(self) -> bool:
        return any(table.quantities for table in self.tables)

    def first(self, quantity: Quantity) -> PercentileBounds | None:
        """The first table with a bound on it: stages divide that one, and others follow in proportion."""
        return next((table for table in self.tables if quantity in table.quantities), None)

    def first_bound(self, quantity: Quantity) -> float | None:
        """Seconds, at the percentile of `first`; None: not bounded at any percentile."""
        table = self.first(quantity)
        return None if table is None else table.bound(quantity)

    def scaled(self, factor: float) -> Self:
        """The same with every bound times `factor`."""
        also = [table.scaled(factor) for table in self.also]
        return super().scaled(factor).model_copy(update={"also": also})

    @model_validator(mode="after")
    def _each_bound_once(self) -> Self:
        seen = {(self.percentile, quantity) for quantity in self.quantities}
        for i, table in enumerate(self.also):
            if not table.quantities:
                remedy = "Write ttft_s, tpot_s or e2e_s in it, or leave it out."
                raise wrong("also", f"no bound in table {i + 1} of it", remedy)
            for quantity in table.quantities:
                if (table.percentile, quantity) in seen:
                    problem = f"a second {quantity}_s for {table.percentile}"
                    raise wrong("also", problem, "Leave one of them out, or give it another percentile.")
                seen.add((table.percentile, quantity))
        return self
