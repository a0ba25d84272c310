"""A model is identified on a thread; requests wait for it once, together, and a failure has a reason."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from time_limits import TimeLimits

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.weights_guard import BackgroundIdentity, CurrentIdentity
from cornplug.errors import CheckpointError

LOG = logging.getLogger("cornplug.test")


def made(identify: Callable[[], bytes]) -> BackgroundIdentity[bytes]:
    return BackgroundIdentity(identify, "KV", LOG.warning)


def reason(identity: BackgroundIdentity[bytes]) -> str:
    with pytest.raises(CheckpointError) as raised:
        identity.get()
    return raised.value.reason


def test_background_identity_found_is_returned() -> None:
    identity = made(lambda: b"model")
    assert identity.wait(60)
    assert (identity.get(), identity.value, identity.failure) == (b"model", b"model", "")


def test_background_identity_while_reading_raises_identifying() -> None:
    go = threading.Event()
    identity = made(lambda: b"model" if go.wait(10) else b"")
    assert not identity.wait(0)
    assert (reason(identity), identity.value, identity.failure) == ("identifying", None, "")
    go.set()
    assert identity.wait(60)
    assert identity.get() == b"model"


def test_background_identity_failure_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise CheckpointError("no such file", reason="missing_file")

    with caplog.at_level(logging.WARNING, LOG.name):
        identity = made(fail)
        assert identity.wait(60)
    assert (reason(identity), identity.failure) == ("missing_file", "missing_file")
    assert caplog.messages == ["cornplug: KV of this engine is not shared: no such file"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_background_identity_unexpected_error_is_identity_error() -> None:
    def broken() -> bytes:
        raise KeyError("rope_parameters")

    identity = made(broken)
    assert identity.wait(60)
    assert (reason(identity), identity.failure) == ("identity_error", "identity_error")


def test_first_wait_of_all_callers_is_bounded_together(
    monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    monkeypatch.setattr(weights_guard, "INITIAL_WAIT_S", 0.2)
    go = threading.Event()
    identity = made(lambda: b"model" if go.wait(60) else b"")
    began = time.monotonic()
    with within(8, "fifty waits take 10 s"):
        assert not any(identity.wait_initially() for _ in range(50))
    assert time.monotonic() - began >= 0.2
    go.set()
    assert identity.wait(60)


def test_first_wait_after_reading_ended_is_zero() -> None:
    identity = made(lambda: b"model")
    assert identity.wait(60)
    assert identity.initial_wait_s() == 0
    assert identity.wait_initially()


def test_current_identity_of_each_epoch_is_read_anew() -> None:
    read: list[int] = []
    identity = CurrentIdentity(lambda: read.append(1) or len(read), "KV", LOG.warning)
    state = engine_state.current()

    def found() -> tuple[int, int]:
        assert identity.current()[1].wait(60)
        return identity.get()

    assert found() == found() == (0, 1)
    odd = state.begin_update()
    with pytest.raises(CheckpointError) as raised:
        identity.get()
    assert raised.value.reason == "weights_updated"
    assert len(read) == 1
    state.end_update(odd, "/new", 1)
    assert found() == found() == (2, 2)


def test_current_identity_that_outlasts_its_epoch_is_none() -> None:
    """It may be of the weights of another epoch."""
    go = threading.Event()
    state = engine_state.current()
    state.end_update(state.begin_update(), "/new", 1)
    identity = CurrentIdentity(lambda: go.wait(10), "KV", LOG.warning)
    _, slow = identity.current()
    odd = state.begin_update()
    go.set()
    assert slow.wait(60)
    assert (slow.value, slow.failure) == (None, "weights_updated")
    state.end_update(odd, "/newer", 1)
    assert identity.current()[1].wait(60)
    assert identity.get() == (4, True)
