"""The daemon's log: repeated lines are left out and counted, and a file does not grow without end."""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cornplug.config import StoreConfig
from cornplug.store.daemon import main
from cornplug.store.daemon.main import MAX_LINES, RateLimitedHandler

GARBAGE = b"GET / HTTP/1.1\r\nHost: store\r\n\r\n"


@contextmanager
def log_to(path: Path, *, most_bytes: int | None = None) -> Iterator[logging.Logger]:
    log = logging.Logger("test")
    with path.open("a") as file:
        log.addHandler(RateLimitedHandler(file, max_bytes=most_bytes))
        yield log


def test_daemon_log_is_not_filled_by_garbage_connections(
    start_daemon: Callable[..., subprocess.Popen[str]], store_config: StoreConfig
) -> None:
    daemon = start_daemon()
    for _ in range(5 * MAX_LINES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(store_config.socket))
            client.sendall(GARBAGE)
            assert client.recv(1) == b"", "it ends the connection"
    daemon.terminate()
    _, log = daemon.communicate(timeout=30)
    assert log.count("no frames") == MAX_LINES


def test_bounded_log_counts_the_lines_that_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_to(tmp_path / "log") as log:
        for number in range(MAX_LINES + 3):
            log.warning("client %d ends", number)
        log.warning("another kind")
        monkeypatch.setattr(main, "PERIOD_S", 0.0)
        log.warning("client %d ends", 99)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:MAX_LINES] == [f"client {number} ends" for number in range(MAX_LINES)]
    assert lines[MAX_LINES:] == ["another kind", "client 99 ends (3 lines like this were left out)"]


def test_bounded_log_file_is_emptied_beyond_its_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 2000)
    with log_to(path, most_bytes=1000) as log:
        log.warning("first")
        log.warning("second")
    assert path.read_text() == "first\nsecond\n"
