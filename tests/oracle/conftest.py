"""Checkpoints of the oracle are written while the "engine" runs."""

from __future__ import annotations

from unittest import mock

import pytest

from cornplug.engine_common import engine_state


@pytest.fixture(scope="module", autouse=True)  # before the checkpoints that a module shares are made
def began_later() -> None:
    with mock.patch.object(engine_state, "file_clock_ns", return_value=2**63):
        engine_state.record_engine_start()
