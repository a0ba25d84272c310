"""The unix socket for engines of this host and user: a handshake, then frames of `protocol`.

A connection that sends anything but frames of ours is closed, alone. When a client goes,
what it waited for is cancelled, and no tower runs for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.scheduling.batcher import Answer
from cornplug.encoder_service.wire.framing import LENGTH
from cornplug.encoder_service.wire.handshake import (
    MAX_BYTES,
    PATIENCE_S,
    ServiceHandshake,
    UntrustedPeer,
    peer_uid,
)
from cornplug.encoder_service.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    DescribeReply,
    DescribeRequest,
    EncodeRequest,
    Reply,
    Request,
)
from cornplug.errors import ConfigError
from cornplug.private_paths import open_folder

_LISTEN_BACKLOG: Final = 64

log = logging.getLogger(__name__)


def claim(path: Path) -> tuple[socket.socket, int]:
    """Listen at `path` (mode 0600, in a folder of this user only), replacing a dead service's socket.

    Returns the socket and the descriptor of a lock to keep open as long as the service lives.
    Raises ConfigError when another service lives there, another user could put a socket there, or the
    path cannot be one.
    """
    lock = -1
    try:
        os.close(open_folder(path.parent, setting="encoder.socket"))
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(_LISTEN_BACKLOG)
        listener.setblocking(False)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            "encoder.socket", f"another service lives at {path}", "Stop it, or give --socket another path."
        ) from None
    except OSError as e:
        if lock >= 0:
            os.close(lock)
        raise ConfigError(
            "encoder.socket",
            f"cannot listen at {path}: {e.strerror or e}",
            "Give --socket a short path that you may write.",
        ) from e
    return listener, lock


class UnixServer:
    """Accepts connections on a listening unix socket and speaks the protocol on each."""

    def __init__(self, encoder: EncoderCore, listener: socket.socket, *, secret: bytes) -> None:
        self._encoder = encoder
        self._secret = secret
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to accept."""
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener)

    def stop_accepting(self) -> None:
        """Take no new connection; those that are open go on."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """End every connection."""
        self.stop_accepting()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            if (uid := peer_uid(writer.get_extra_info("socket"))) != os.getuid():
                log.warning("refused a connection of user %d", uid)
                return
            if not await _greeted(reader, writer, ServiceHandshake(self._secret)):
                return
            await _Connection(self._encoder, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has gone: nobody is left to tell.
        except asyncio.CancelledError:
            pass  # `close`: the task ends here, and asyncio (3.11) would log a cancelled one as an error.
        finally:
            writer.close()


class _Connection:
    def __init__(
        self, encoder: EncoderCore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._encoder = encoder
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._pending: set[Future[Answer]] = set()

    async def run(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if not 0 < size <= MAX_FRAME_BYTES:
                    log.warning("closed a connection: a frame of %d bytes", size)
                    return
                frame = await self._reader.readexactly(size)
                try:
                    request = self._decode(frame)
                except (msgspec.ValidationError, msgspec.DecodeError) as e:
                    log.warning("closed a connection: no message of ours: %s", e)
                    return
                self._handle(request)
                # A client that reads no answers may not make us hold ever more of them.
                await self._writer.drain()
        finally:
            for future in tuple(self._pending):
                future.cancel()

    def _handle(self, request: DescribeRequest | EncodeRequest) -> None:
        if isinstance(request, DescribeRequest):
            self._send(DescribeReply(version=PROTOCOL_VERSION, models=self._encoder.registry.served()))
            return
        future = self._encoder.submit(request)
        self._pending.add(future)
        future.add_done_callback(self._answered)

    def _answered(self, future: Future[Answer]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reply, future)

    def _reply(self, future: Future[Answer]) -> None:
        self._pending.discard(future)
        if not future.cancelled() and not self._writer.is_closing():
            self._send(future.result())

    def _send(self, reply: Reply) -> None:
        frame = self._encode(reply)
        self._writer.write(LENGTH.pack(len(frame)) + frame)


async def _greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answering: ServiceHandshake
) -> bool:
    """Whether the engine has proved in time that it has the secret."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            challenge = answering.challenge(await _small_frame(reader))
            writer.write(LENGTH.pack(len(challenge)) + challenge)
            answering.check(await _small_frame(reader))
    except TimeoutError:
        log.warning("closed a connection: no handshake within %g s", PATIENCE_S)
    except (UntrustedPeer, msgspec.ValidationError, msgspec.DecodeError) as e:
        log.warning("closed a connection: no engine that has this secret, or one of another version: %s", e)
    else:
        return True
    return False


async def _small_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if not 0 < size <= MAX_BYTES:
        raise UntrustedPeer(f"a frame of {size} bytes")
    return await reader.readexactly(size)
