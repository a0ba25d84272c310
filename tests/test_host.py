"""Facts of the host."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Sequence

import httpx
import pytest

from cornplug.host import free_port, tls_context
from cornplug.processes import responds_ok


def test_free_port_is_none_that_outgoing_connections_get() -> None:
    ports = {free_port() for _ in range(50)}
    assert max(ports) < 32_768
    assert len(ports) > 40, "two processes that ask at once hardly get the same"


def test_free_port_with_room_has_it_below_outgoing_connections() -> None:
    assert max(free_port(extra_ports=12_000) for _ in range(50)) < 32_768 - 12_000


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


def test_tls_context_of_all_polls_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    tls_context()

    def context(*_args: object, **_options: object) -> object:
        made.append(1)
        raise AssertionError("the host's list of authorities was read again")

    monkeypatch.setattr(httpx, "create_ssl_context", context)
    monkeypatch.setattr(ssl, "create_default_context", context)
    for _ in range(3):
        assert not responds_ok(f"http://127.0.0.1:{free_port()}/health")
    assert not made
