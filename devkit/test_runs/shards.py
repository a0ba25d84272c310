"""Expected durations of units, and their distribution over shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from devkit.test_runs.units import ANYWHERE, INTEGRATION, TREE, Unit

DURATIONS: Final = TREE / "tests" / "durations.json"
"""Unit -> seconds on two cores without a GPU. `script/test-more --record` writes it."""

_DEFAULT_ENGINE_TEST_S: Final = 60
_DEFAULT_TEST_S: Final = 20
_DEFAULT_ANYWHERE_S: Final = 1000


def read_durations(file: Path = DURATIONS) -> dict[str, float]:
    """Recorded seconds by unit."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def record_durations(measured: Mapping[str, float], file: Path = DURATIONS) -> None:
    """Replace the recorded seconds of these units, and drop units whose file no longer exists."""
    merged = {**read_durations(file), **{name: round(seconds) for name, seconds in measured.items()}}
    kept = {name: merged[name] for name in sorted(merged) if (TREE / name.split()[-1]).exists()}
    file.write_text(json.dumps(kept, indent=1) + "\n")


def expected_s(unit: Unit, durations: Mapping[str, float]) -> float:
    """The recorded duration of a unit, or a cautious guess from its number of tests."""
    if unit.name in durations:
        return durations[unit.name]
    if unit.file == ANYWHERE:
        return _DEFAULT_ANYWHERE_S
    return unit.tests * (_DEFAULT_ENGINE_TEST_S if unit.file.startswith(INTEGRATION) else _DEFAULT_TEST_S)


def pack(units: Iterable[Unit], durations: Mapping[str, float], shards: int) -> list[list[Unit]]:
    """Distribute units over shards: the longest remaining unit goes to the shard with the least work.

    The result depends on the units and durations only, so that each shard can compute it for itself.
    """
    packed: list[list[Unit]] = [[] for _ in range(shards)]
    loads = [0.0] * shards
    for unit in sorted(units, key=lambda unit: (-expected_s(unit, durations), unit.name)):
        least = loads.index(min(loads))
        packed[least].append(unit)
        loads[least] += expected_s(unit, durations)
    return [sorted(shard, key=lambda unit: unit.name) for shard in packed]


def total_s(units: Sequence[Unit], durations: Mapping[str, float]) -> float:
    """Expected seconds of these units, one after the other."""
    return sum(expected_s(unit, durations) for unit in units)
