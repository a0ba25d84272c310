"""An engine that only waits for copies rests; one that computes never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector import kv_connector
from cornplug.vllm_connector.cpu_use import BACKOFF_S, IdleBackoff, WakeTimer

from ...store.shelved_store import ShelvedStore
from ..rig import Engine


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def rest(slept: list[float]) -> IdleBackoff:
    return IdleBackoff(slept.append)


def test_idle_rest_second_empty_step_sleeps(rest: IdleBackoff, slept: list[float]) -> None:
    for _ in range(3):
        rest.sleep_if_idle(is_empty=True, has_pending_work=lambda: True)
    assert slept == [BACKOFF_S, BACKOFF_S]


def test_idle_rest_step_after_one_that_computes_is_not_delayed(rest: IdleBackoff, slept: list[float]) -> None:
    for empty in (True, False, True):
        rest.sleep_if_idle(is_empty=empty, has_pending_work=lambda: True)
    assert not slept


def test_idle_rest_engine_that_waits_for_others_is_not_delayed(rest: IdleBackoff, slept: list[float]) -> None:
    for _ in range(3):
        rest.sleep_if_idle(is_empty=True, has_pending_work=lambda: False)
    assert not slept


def test_idle_rest_engine_that_other_replicas_wait_for_is_not_delayed(slept: list[float]) -> None:
    alarm = WakeTimer()
    alarm.bind(lambda: None, in_wave=lambda: True)
    rest = IdleBackoff(slept.append, alarm)
    for _ in range(3):
        rest.sleep_if_idle(is_empty=True, has_pending_work=lambda: True)
    assert not slept


def test_idle_rest_request_whose_pages_are_on_disk_lets_the_engine_rest(
    engine: Callable[..., Engine],
    store: MemoryStore,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(150))
    engine().run("first", prompt)
    shelved = ShelvedStore(store.connect())
    shelved.shelve_all(store)
    shelved.looks = None
    monkeypatch.setattr(kv_connector, "IdleBackoff", lambda: IdleBackoff(slept.append))
    second = engine(connect=lambda: shelved)
    second.add("b", prompt)
    for _ in range(4):
        second.step()
    assert slept == [BACKOFF_S] * len(slept)
    assert len(slept) >= 2


def test_idle_rest_running_request_is_not_delayed(
    engine: Callable[..., Engine], slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector, "IdleBackoff", lambda: IdleBackoff(slept.append))
    only = engine()
    only.add("a", list(range(150)))
    only.step()
    assert not slept
