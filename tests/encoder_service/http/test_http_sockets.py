"""What only a real server and real sockets show: clients that hang up, and clients that stop reading."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cornplug.config import Config
from cornplug.encoder_service import server
from cornplug.encoder_service.server import HeaderTimeoutProtocol
from cornplug.encoder_service.towers.tiles import TileTower

from ..conftest import MakeEncoder, eventually, png, sample_image
from ..http_service import Service


@contextmanager
def serving(app: Any, listener: socket.socket) -> Iterator[int]:
    """An application behind the server that `cornplug encoder` runs."""
    web = uvicorn.Server(
        uvicorn.Config(app, http=HeaderTimeoutProtocol, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        web.should_exit = True
        thread.join()
        listener.close()


def send(port: int, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    head = "POST /v1/encode HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}"
    s = socket.create_connection(("127.0.0.1", port), timeout=10)
    s.sendall(head.encode() + b"\r\n\r\n" + data)
    return s


def test_http_closed_connection_cancels_work(
    make_encoder: MakeEncoder,
    config: Config,
    llava_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()
    entered = threading.Semaphore(0)
    ran: list[int] = []
    real: Callable[..., Any] = TileTower.encode

    def encode(tower: TileTower, batch: Any) -> Any:
        ran.append(len(batch))
        entered.release()
        assert let_go.wait(20)
        return real(tower, batch)

    monkeypatch.setattr(TileTower, "encode", encode)
    service = Service(make_encoder(max_batch_items=1), config)
    images = [base64.b64encode(png(sample_image(seed))).decode() for seed in range(2)]
    waiting = service.encoder.count_waiting
    with ExitStack() as stack:
        stack.callback(let_go.set)
        port = stack.enter_context(serving(service.app, socket.create_server(("127.0.0.1", 0))))
        model = str(llava_pair[0])
        first = stack.enter_context(send(port, {"model": model, "image": images[0]}))
        assert entered.acquire(timeout=60)
        gone = send(port, {"model": model, "image": images[1]})
        eventually(lambda: waiting() == 2)
        gone.close()
        eventually(lambda: waiting() == 1)
        let_go.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
    assert ran == [1]


def test_http_unread_answer_closes_connection(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    monkeypatch.setattr(server, "UNREAD_TIMEOUT_S", 1.0)
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            # An end of its own, so that a failure is one: uvicorn sends nothing after a lost connection.
            for _ in range(400):
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
                if (await _poll(receive))["type"] == "http.disconnect":
                    return
        finally:
            ended.set()

    listeners = server.BoundListeners.open(config)
    try:
        with serving(app, listeners.http) as port, send(port, {}):
            assert ended.wait(20)
    finally:
        listeners.close()


async def _poll(receive: Any) -> Any:
    try:
        async with asyncio.timeout(0.001):
            return await receive()
    except TimeoutError:
        return {"type": "nothing"}
