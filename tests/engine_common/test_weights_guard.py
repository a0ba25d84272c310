"""Sharing ends when an engine's weights are replaced, and the log says why, once."""

from __future__ import annotations

import logging

import pytest

from cornplug.engine_common import engine_state, weights_guard

LOG = logging.getLogger("cornplug.test")


def test_weights_guard_note_replaced_ends_sharing_of_whole_engine(caplog: pytest.LogCaptureFixture) -> None:
    assert not weights_guard.has_replaced_weights()
    with caplog.at_level(logging.WARNING, LOG.name):
        weights_guard.record_replacement("sleep level 2", LOG)
    assert weights_guard.has_replaced_weights()
    assert engine_state.current().has_replaced_weights(), "where the engine's other processes see it"
    assert caplog.messages == [
        "cornplug: weights replaced by sleep level 2; this engine shares nothing until restart"
    ]


def test_weights_guard_second_replacement_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOG.name):
        weights_guard.end_sharing("a norm is another", LOG)
        weights_guard.record_replacement("update_weights", LOG)
    assert [message.split(";")[0] for message in caplog.messages] == ["cornplug: a norm is another"]
