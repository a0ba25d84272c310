"""Facts of the host."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import pytest

from cornplug.host import free_port


def test_free_port_is_none_that_outgoing_connections_get() -> None:
    ports = {free_port() for _ in range(50)}
    assert max(ports) < 32_768
    assert len(ports) > 40, "two processes that ask at once hardly get the same"


def test_free_port_on_which_another_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()

        def sample(ports: Sequence[int], count: int) -> list[int]:
            return [port, *(one for one in ports[:count] if one != port)]

        monkeypatch.setattr(random, "sample", sample)
        assert free_port() != port


def test_free_port_where_all_are_taken_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port: int = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda *_: [port])
        with pytest.raises(OSError, match="no free port"):
            free_port()
