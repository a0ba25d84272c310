"""The end of a service, and the connections that it cuts off: real processes and real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from PIL import Image
from time_limits import TimeLimits

from cornplug.config import Config
from cornplug.encoder_service import server
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.server import SOCKET_CHECK_S, uvicorn_config
from cornplug.private_paths import read_secret
from devkit.open_requests import OpenRequests
from devkit.processes import EncoderProcess

from .conftest import eventually, png, sample_image
from .hostile_images import many_scans

ITEMS = 48


@pytest.mark.more
def test_server_sigterm_under_load_answers_requests_then_ends(
    llava_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Running requests are answered in full; new ones get 503 at once; the exit status is 0."""
    model = str(llava_pair[0])
    images = [png(Image.new("RGB", (900, 900), (1, i, 0))) for i in range(ITEMS)]
    data = {"model": model, "deadline_s": "60"}
    options = ("--no-store", "--threads", "1")
    with EncoderProcess([model], *options, socket=tmp_path / "e.sock") as process:
        # A connection of before, as a load balancer's probe has one.
        with (
            httpx.Client(base_url=process.url, timeout=10, trust_env=False) as probe,
            OpenRequests(process.url) as requests,
        ):
            assert probe.get("/ready").status_code == 200
            requests.send("/v1/encode", ({"data": data, "files": {"image": image}} for image in images))
            os.kill(process.pid, signal.SIGTERM)
            eventually(lambda: probe.get("/ready").status_code == 503, 5)
            assert requests.answered() < ITEMS, "all was done before: the test saw no draining"
            late = probe.post("/v1/encode", data={"model": model}, files={"image": png(sample_image(1))})
            assert requests.statuses() == [200] * ITEMS
        assert process.wait_until_ended(60) == 0
    assert (late.status_code, late.json()["error"]["reason"]) == (503, "draining")


@pytest.mark.more
def test_server_sigterm_while_decoding_ends_the_process(
    llava_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Before: "stopped" was logged, and the process lived on until the last image was decoded."""
    model = str(llava_pair[0])
    slow = many_scans(7900, 7900, 95)
    env = {"CORNPLUG_ENCODER_PREPARE_THREADS": "2", "CORNPLUG_ENCODER_DRAIN_S": "1"}
    with EncoderProcess(
        [model], "--no-store", "--threads", "1", socket=tmp_path / "e.sock", env=env
    ) as process:

        def attack(_: int) -> int:
            with httpx.Client(timeout=60, trust_env=False) as http:
                data = {"model": model, "deadline_s": "60"}
                return http.post(f"{process.url}/v1/encode", data=data, files={"image": slow}).status_code

        with ThreadPoolExecutor(6) as attackers:
            answers = attackers.map(attack, range(6))
            eventually(lambda: decoding(process.url) >= 4, 30)
            began = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            assert process.stop(grace_s=30) == 0
            assert time.monotonic() - began < 20
            assert set(answers) <= {200, 422, 503, 504}


def decoding(url: str) -> float:
    """Media that wait to be decoded."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    name = "cornplug_encoder_preparing_requests"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.more
def test_server_socket_removed_by_a_cleaner_is_made_again(
    llava_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Engines that start later reach the service, and it still removes its socket at the end."""
    path = tmp_path / "e.sock"
    secret_file = tmp_path / "secret"
    env = {"CORNPLUG_STORE_SECRET_FILE": str(secret_file)}
    with EncoderProcess([llava_pair[0]], "--no-store", socket=path, env=env) as process:
        secret = read_secret(secret_file)
        with SocketEncoder(path, secret) as before:
            served = before.describe(20)
            path.unlink()
            eventually(path.exists, SOCKET_CHECK_S + 30)
            with SocketEncoder(path, secret) as after:
                eventually(lambda: after.connected, 30)
                assert after.describe(20) == served
            assert before.describe(20) == served
        assert process.stop() == 0
    assert not path.exists()


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.15)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(
        uvicorn.Config(_app, http=server.HeaderTimeoutProtocol, lifespan="off", log_level="error")
    )
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    running.should_exit = True
    thread.join()
    listener.close()


REQUEST = b"GET / HTTP/1.1\r\nhost: e\r\n\r\n"


@pytest.mark.parametrize("first", [b"", b"GET / HTT", REQUEST + b"GET / HT"])
def test_server_endless_request_head_is_cut_off(port: int, first: bytes, within: TimeLimits) -> None:
    with within(9), socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        s.sendall(first)
        answer = b"".join(iter(lambda: s.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 204") == first.startswith(REQUEST)


def test_server_used_connection_stays_open(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        for _ in range(8):
            s.sendall(REQUEST)
            assert s.recv(4096).startswith(b"HTTP/1.1 204")
            time.sleep(0.07)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: e\r\ncontent-length: 9\r\n\r\nab"]
)
def test_server_idle_connections_give_way_to_new_ones(
    sent: bytes, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each that comes, one that asks nothing or has not finished asking; never one that is waiting."""
    slow, asked = asyncio.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if scope["path"] == "/slow":
                asked.set()
                while (await receive()).get("more_body"):
                    pass
                await slow.wait()
            elif scope["method"] == "POST":
                while (await receive()).get("more_body"):
                    pass
            await _app(scope, receive, send)

    monkeypatch.setattr(server, "max_connections", lambda: 20)
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn_config(app, config.encoder))
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await web.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    with contextlib.ExitStack() as stack:

        def connect(first: bytes) -> socket.socket:
            one = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
            one.sendall(first)
            return one

        waiting = connect(b"GET /slow HTTP/1.1\r\nhost: e\r\n\r\n")
        assert asked.wait(20)
        for _ in range(3):
            for _ in range(60):
                with contextlib.suppress(OSError):
                    connect(sent)
            probe = connect(REQUEST)
            assert probe.recv(4096).startswith(b"HTTP/1.1 204")
        loops[0].call_soon_threadsafe(slow.set)
        assert waiting.recv(4096).startswith(b"HTTP/1.1 204")
    web.should_exit = True
    thread.join()
    listener.close()


def test_server_forwarded_headers_are_not_believed(config: Config) -> None:
    """uvicorn would take X-Forwarded-For from this host for the asker."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])
        await _app(scope, receive, send)

    settings = uvicorn_config(app, config.encoder)
    settings.load()
    headers = {"x-forwarded-for": "198.51.100.7", "forwarded": "for=198.51.100.7"}

    async def ask() -> None:
        transport = httpx.ASGITransport(settings.loaded_app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            await client.get("/", headers=headers)

    asyncio.run(ask())
    assert seen == ["127.0.0.1"]


FLOOD = 1400


@pytest.mark.more
def test_server_flood_of_idle_connections_leaves_room_for_health(
    short_path: Path, llava_pair: tuple[Path, Path]
) -> None:
    """Of 1,400 with 1,024 descriptors; /health was silent for 17 s, for good where the flood went on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    process = EncoderProcess(
        [str(llava_pair[0])], "--no-store", "--threads", "1", socket=short_path / "e.sock"
    )
    process.argv[:0] = ["prlimit", "--nofile=1024:1024"]
    took: list[float] = []
    try:
        with process, contextlib.ExitStack() as stack:
            for _ in range(FLOOD):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", process.port))
            for _ in range(5):
                began = time.monotonic()
                assert httpx.get(f"{process.url}/health", timeout=20, trust_env=False).status_code == 200
                took.append(time.monotonic() - began)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert max(took) < 12, took
