"""Far stores, really running, and hosts that share by them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .far_stage import Host, RedisServer


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A folder that hosts share."""
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(program, port, tmp_path)
    server.start()
    yield server
    server.end()


@pytest.fixture
def host(short_path: Path) -> Iterator[Callable[..., Host]]:
    """Makes hosts: each has a daemon of its own; those of one `secret` are of one sharing domain."""
    hosts: list[Host] = []

    def make(*urls: str, secret: bytes = b"d" * 32, size_bytes: int = 4 << 20) -> Host:
        folder = short_path / f"h{len(hosts)}"
        folder.mkdir(mode=0o700)
        hosts.append(Host(folder, urls, secret, size_bytes))
        return hosts[-1]

    yield make
    for one in hosts:
        one.end()


@pytest.fixture(params=["file", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a far store, of each kind."""
    if request.param == "file":
        share: Path = request.getfixturevalue("share")
        return f"file://{share}"
    redis: RedisServer = request.getfixturevalue("redis")
    return redis.url
