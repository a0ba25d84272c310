"""Checkpoints of the oracle are written while the "engine" runs."""

from __future__ import annotations

import pytest

from cornplug.engine_common import engine_state


@pytest.fixture(scope="module", autouse=True)  # before the checkpoints that a module shares are made
def began_later() -> None:
    engine_state.current()._begin(2**63)
