"""The tower's time is the device's, not Python's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from time_limits import TimeLimits

from cornplug.engine_common.embeddings import TowerClock


def test_tower_clock_measures_time_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Python has gone on long before the tower has ended."""
    reached: list[int] = []
    made: list[Any] = []

    def event(enable_timing: bool) -> Any:
        number = len(made)
        made.append(
            SimpleNamespace(
                number=number,
                record=lambda: None,
                query=lambda: number in reached,
                elapsed_time=lambda other: 10.0 * (other.number - number),
            )
        )
        return made[-1]

    monkeypatch.setattr("torch.cuda.Event", event)
    clock = TowerClock(torch.device("cuda", 0))
    clock.begin()
    clock.ran(3)
    clock.ran(4)
    assert clock.measured() == []
    clock.begin()
    assert clock.measured() == []
    reached += [2]
    assert clock.measured() == [(7, 0.02)]
    assert clock.measured() == []


def test_tower_clock_step_without_tower_is_not_measured(within: TimeLimits) -> None:
    clock = TowerClock(torch.device("cpu"))
    clock.begin()
    assert clock.measured() == []
    clock.begin()
    time.sleep(0.02)
    clock.ran(5)
    [(rows, seconds)] = clock.measured()
    assert rows == 5
    assert seconds >= 0.02
    within.check(seconds, 60)
