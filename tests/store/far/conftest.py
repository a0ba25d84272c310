"""Far stores, really running, and hosts that share by them."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cornplug.host import free_port
from devkit.far_servers import RedisServer, redis_program
from devkit.vllm_beds import NIXL, bed_environment

from ..conftest import eventually
from .far_stage import Host, MooncakeMaster, answers_at


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A folder that hosts share."""
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an S3 server, which takes as long to start as a dozen of its tests."""
    port, log = free_port(), tmp_path_factory.mktemp("s3") / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
    eventually(lambda: server.poll() is not None or answers_at(port))
    assert server.poll() is None, log.read_text()
    yield port
    server.kill()
    server.wait()


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket of its own; the environment names the server."""
    address, bucket = f"http://127.0.0.1:{s3_port}", f"b{secrets.token_hex(8)}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with urllib.request.urlopen(urllib.request.Request(f"{address}/{bucket}", method="PUT"), timeout=10):
        return f"s3://{bucket}/cornplug"


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[MooncakeMaster]:
    pytest.importorskip("mooncake", reason="there is no wheel of it for every interpreter")
    with MooncakeMaster(tmp_path) as master:
        yield master


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    program = redis_program()
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with RedisServer(program, tmp_path) as server:
        yield server


@pytest.fixture
def host(short_path: Path) -> Iterator[Callable[..., Host]]:
    """Makes hosts: each has a daemon of its own; those of one `secret` are of one sharing domain."""
    hosts: list[Host] = []

    def make(
        *urls: str,
        secret: bytes = b"d" * 32,
        size_bytes: int = 4 << 20,
        answer: bool = True,
        inside: Sequence[str] = (),
    ) -> Host:
        folder = short_path / f"h{len(hosts)}"
        folder.mkdir(mode=0o700)
        hosts.append(Host(folder, urls, secret, size_bytes, answer=answer, inside=inside))
        return hosts[-1]

    yield make
    for one in hosts:
        one.end()


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of three members on this host, whose daemons find NIXL."""
    if importlib.util.find_spec("nixl") is None:
        try:
            path = bed_environment("v1", NIXL)["PYTHONPATH"]
        except FileNotFoundError:
            pytest.skip("script/setup laid no NIXL here")
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.syspath_prepend(path.partition(os.pathsep)[0])
    return "nixl://" + "+".join(f"127.0.0.1:{free_port()}" for _ in range(3)) + "?segment=64MiB"


_SERVED = [pytest.param(kind, marks=pytest.mark.more) for kind in ("mooncake", "nixl", "s3")]


@pytest.fixture(params=["file", *_SERVED, "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a far store, of each kind."""
    if request.param == "file":
        return f"file://{request.getfixturevalue('share')}"
    if request.param in ("nixl", "s3"):
        address: str = request.getfixturevalue(request.param)
        return address
    server: MooncakeMaster | RedisServer = request.getfixturevalue(
        "mooncake" if request.param == "mooncake" else "redis"
    )
    return server.url
