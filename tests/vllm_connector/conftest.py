"""A store in memory, engines around it, and a check that nothing of theirs is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from keyed_store import KeyedStore
from vllm.model_executor.models import registry

from cornplug.engine_common import engine_state
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore

from .rig import Engine


@pytest.fixture(scope="session", autouse=True)
def model_classes_in_process() -> Iterator[None]:
    """vLLM looks at each model class in a process of its own, so that none touches a GPU: 15 s each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture
def store() -> KeyedStore:
    return KeyedStore(capacity_bytes=8 << 20)


@pytest.fixture
def engine(store: MemoryStore) -> Iterator[Callable[..., Engine]]:
    """Engines over `store`; each process has a connection of its own."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(options.pop("connect", store.connect), **options))
        return engines[-1]

    yield make
    for one in engines:
        one.close()


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store.connect())


@pytest.fixture(autouse=True)
def original_weights() -> Iterator[None]:
    engine_state.current().mark_weights_unknown(False)
    # Tests write their checkpoints while the "engine" runs.
    with mock.patch.object(engine_state, "file_clock_ns", return_value=2**63):
        engine_state.record_engine_start()
    yield
    engine_state.current().mark_weights_unknown(False)


def open_in(store: MemoryStore) -> tuple[int, int]:
    """(leases, reservations) that somebody holds."""
    stat = store.connect().stat(deadline_s=1)
    return stat.leases, stat.reservations
