"""The tower's time is the device's, not Python's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from time_limits import TimeLimits

from cornplug.engine_common.embeddings import TowerTimer


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
    clock = TowerTimer(torch.device("cuda", 0))
    clock.begin_step()
    clock.record_rows(3)
    clock.record_rows(4)
    assert clock.take_measurements() == []
    clock.begin_step()
    assert clock.take_measurements() == []
    reached += [2]
    assert clock.take_measurements() == [(7, 0.02)]
    assert clock.take_measurements() == []


def test_tower_clock_step_without_tower_is_not_measured(within: TimeLimits) -> None:
    clock = TowerTimer(torch.device("cpu"))
    clock.begin_step()
    assert clock.take_measurements() == []
    clock.begin_step()
    time.sleep(0.02)
    clock.record_rows(5)
    [(rows, seconds)] = clock.take_measurements()
    assert rows == 5
    assert seconds >= 0.02
    within.check(seconds, 60)
