"""Services for the client's tests: real ones in threads of this process, and ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

import uvicorn

from devkit.processes import wait_until

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Threaded:
    """Something with an event loop in a thread, at `url`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self.thread.join(60)
        self.listener.close()
        self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # closed connections leave the loop with its next turn
        self.loop.stop()


class Served(_Threaded):
    """An ASGI application at a real port. `kill` ends it as SIGKILL would, for connected clients."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = self.server.serve(sockets=[self.listener])
        self.serving = asyncio.run_coroutine_threadsafe(serving, self.loop)
        wait_until(lambda: self.server.started, deadline_s=60, what="uvicorn")

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.serving.result(60)
        super().__exit__()

    def kill(self) -> None:
        def abort() -> None:
            for server in self.server.servers:
                server.close()
            self.listener.close()
            for connection in list(self.server.server_state.connections):
                connection.transport.abort()

        self.loop.call_soon_threadsafe(abort)


class Misbehaving(_Threaded):
    """A server that reads each request whole, counts it, and then does as told."""

    def __init__(self, behave: Behaviour) -> None:
        super().__init__()
        self.requests: list[bytes] = []
        """Head and body of each."""
        self.connections = 0
        self._behave = behave
        asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, sock=self.listener), self.loop
        ).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(length[0].partition(b":")[2]) if length else 0)
                self.requests.append(head + body)
                await self._behave(reader, writer)
                await writer.drain()


def says(status: int, body: bytes, **headers: str) -> Behaviour:
    """Answers the same each time."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return behave


async def resets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ends the connection with RST."""
    writer.transport.abort()


async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keeps the connection open."""
    await asyncio.sleep(60)


async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte of an endless header every 20 ms: no single read ever times out."""
    writer.write(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        writer.write(b"y")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drips_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A good head, then a byte every 20 ms."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b"y")
        await writer.drain()
        await asyncio.sleep(0.02)


async def half(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half an answer, then the end."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: 4096\r\ncontent-type: application/vnd.safetensors\r\n\r\n"
        + bytes(2048)
    )
    await writer.drain()
    writer.close()


async def raves(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Not HTTP."""
    writer.write(b"\x00\xff" * 400)
