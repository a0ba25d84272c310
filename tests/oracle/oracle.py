"""Judges cases: where numbers differ, keys must; where only a name differs, they must not."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cornplug.errors import CheckpointError

from .changes import KINDS, Case
from .deployments import Deployment, Writer
from .keys import Keys, keys
from .numbers import UNEXPECTED, Numbers, Transformers, Unusable


@dataclass
class Row:
    """What came of the cases of one kind."""

    cases: int = 0
    other_numbers: int = 0
    """Cases in which any number is another."""
    other_keys: int = 0
    refused: int = 0
    """Cases in which nothing would be shared."""
    lost: int = 0
    """Cases in which some key is another though what it names is the same."""


@dataclass
class Report:
    rows: dict[str, Row] = field(default_factory=dict)
    holes: list[str] = field(default_factory=list)
    """Equal keys for other numbers."""
    parted: list[str] = field(default_factory=list)
    """Other keys for what only has another name."""
    crashed: list[str] = field(default_factory=list)
    """Odd files on which the keys' code ends in something else than a CheckpointError."""
    drawn: int = 0
    """Also those that transformers does not run."""

    @property
    def cases(self) -> int:
        return sum(row.cases for row in self.rows.values())

    def table(self) -> str:
        """kinds of change, cases, differing numbers, differing keys, refused, sharing lost"""
        titles = ("change", "cases", "other numbers", "other keys", "refused", "sharing lost")
        lines = [[name, *map(str, vars(row).values())] for name, row in self.rows.items()]
        whole = [
            sum(column) for column in zip(*(vars(row).values() for row in self.rows.values()), strict=True)
        ]
        lines = [list(titles), *lines, ["all", *map(str, whole)]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


class Oracle:
    """Computes deployments and their keys; remembers those that many cases are compared with."""

    def __init__(self, root: Path, bases: Sequence[Deployment]) -> None:
        self.bases = bases
        self._writer = Writer(root)
        self._transformers = Transformers()
        self._known: OrderedDict[int, tuple[Deployment, Numbers, Keys]] = OrderedDict()
        for base in bases:
            self._writer.keep(base)
            self._observed(base)

    def run(self, seed: int, cases: int, kinds: Sequence[str] = tuple(KINDS)) -> Report:
        """Judge so many cases, of the kinds in the proportion that `KINDS` gives them."""
        report = Report({kind: Row() for kind in kinds})
        weights = {kind: KINDS[kind][1] for kind in kinds}
        whole = sum(weights.values())
        for number, kind in enumerate(kinds):
            wanted = max(1, round(cases * weights[kind] / whole))
            rng = random.Random(f"{seed} {kind}")
            rule, _, make = KINDS[kind]
            row = report.rows[kind]
            for _ in range(20 * wanted):
                if row.cases >= wanted:
                    break
                of, changed, what = make(self.bases[(row.cases + number) % len(self.bases)], rng)
                report.drawn += 1
                self._judge(report, Case(kind, rule, of, changed, f"{of.family}: {what}"))
        return report

    def _judge(self, report: Report, case: Case) -> None:
        row = report.rows[case.kind]
        try:
            numbers, before = self._observed(case.of)
            with self._writer.written(case.changed) as (folder, adapter):
                others = self._transformers.numbers(case.changed, folder)
                try:
                    after = keys(case.changed, folder, adapter, others.rows)
                except UNEXPECTED as e:
                    report.crashed.append(f"{case.kind}: {case.what}: {type(e).__name__}: {e}")
                    return
                except CheckpointError:
                    row.cases += 1
                    row.refused += 1
                    row.other_numbers += others != numbers
                    if case.rule == "same":
                        report.parted.append(f"{case.kind}: {case.what}: refused")
                    return
        except Unusable:
            return
        row.cases += 1
        named = list(
            zip((numbers.embedding, *numbers.pages), (others.embedding, *others.pages), strict=False)
        )
        keyed = list(zip((before.embedding, *before.pages), (after.embedding, *after.pages), strict=False))
        row.other_numbers += any(one != other for one, other in named)
        row.other_keys += any(one != other for one, other in keyed)
        lost = False
        for at, ((one, other), (key, other_key)) in enumerate(zip(named, keyed, strict=True)):
            where = "the embedding" if at == 0 else f"page {at - 1}"
            apart = one != other or case.rule == "apart"
            if apart and key == other_key:
                report.holes.append(f"{case.kind}: {case.what}: {where} has the same key")
            if not apart and key != other_key:
                lost = True
                if case.rule == "same":
                    report.parted.append(f"{case.kind}: {case.what}: {where} has another key")
        row.lost += lost

    def _observed(self, deployment: Deployment) -> tuple[Numbers, Keys]:
        known = self._known.get(id(deployment))
        if known is None:
            with self._writer.written(deployment) as (folder, adapter):
                numbers = self._transformers.numbers(deployment, folder)
                known = deployment, numbers, keys(deployment, folder, adapter, numbers.rows)
            self._known[id(deployment)] = known  # holds it, so that its id stays its
            if len(self._known) > 64:
                self._known.pop(list(self._known)[len(self.bases)])
        return known[1], known[2]
