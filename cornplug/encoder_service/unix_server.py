"""The unix socket for engines of this host and user: a handshake, then frames of `wire/messages.py`.

A connection that sends other bytes is closed; the others go on. When a client goes, its requests are
cancelled, and no tower runs for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.scheduling.batcher import Answer
from cornplug.encoder_service.wire.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_BYTES,
    ServiceHandshake,
    UntrustedPeer,
)
from cornplug.encoder_service.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeRequest,
    Reply,
    Request,
)
from cornplug.errors import ProtocolError
from cornplug.local_socket import foreign_user, frame, read_frame, read_frame_length

_LARGE_BYTES: Final = 256 << 10
"""Larger frames are decoded on a thread."""
_LARGE_AT_ONCE: Final = 4
"""Large frames that all connections together hold at a time, of at most MAX_FRAME_BYTES each."""
FRAME_S: Final = 30.0
"""Longest time in which a large frame must arrive. An engine that is stopped in the middle of one holds a
place until then."""

log = logging.getLogger(__name__)


class UnixServer:
    """Accepts connections on a listening unix socket and speaks the protocol on each."""

    def __init__(self, encoder: EncoderCore, listener: socket.socket, *, secret: bytes) -> None:
        self._encoder = encoder
        self._secret = secret
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._frames = _FrameReader()

    async def start(self) -> None:
        """Begin to accept."""
        # A descriptor for asyncio alone: the claim closes its own when it makes the socket again.
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener.dup())

    async def listen_at(self, listener: socket.socket) -> None:
        """Accept there from now on; open connections go on."""
        if listener is not self._listener:
            before, self._listener = self._server, listener
            await self.start()
            if before is not None:
                before.close()

    def stop_accepting(self) -> None:
        """Take no new connection; open ones go on."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """End every connection."""
        self.stop_accepting()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._frames.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            if (uid := foreign_user(writer.get_extra_info("socket"))) is not None:
                log.warning("refused a connection of user %d", uid)
                return
            if not await _greeted(reader, writer, ServiceHandshake(self._secret)):
                return
            await _Connection(self._encoder, self._frames, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has gone.
        except asyncio.CancelledError:
            pass  # `close`: the task ends here; asyncio (3.11) would log a cancelled one as an error.
        finally:
            writer.close()


class _FrameReader:
    """Reads requests of all connections, with a bound on the bytes of large frames. For one event loop."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._threads = ThreadPoolExecutor(1, "cornplug-frames")

    async def request(self, reader: asyncio.StreamReader) -> Request:
        """The next request.

        Raises ProtocolError, msgspec.MsgspecError and RecursionError for bytes that are no request, and
        IncompleteReadError at the end of the stream.
        """
        size = await read_frame_length(reader, limit=MAX_FRAME_BYTES)
        if size <= _LARGE_BYTES:
            return self._decode(await reader.readexactly(size))
        async with self._large:
            try:
                async with asyncio.timeout(FRAME_S):
                    body = await reader.readexactly(size)
            except TimeoutError:
                raise ProtocolError(f"a frame of {size} bytes did not come within {FRAME_S:g} s") from None
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, body)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class _Connection:
    def __init__(
        self,
        encoder: EncoderCore,
        frames: _FrameReader,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._encoder = encoder
        self._frames = frames
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: set[Future[Answer]] = set()

    async def run(self) -> None:
        try:
            while True:
                try:
                    request = await self._frames.request(self._reader)
                except (ProtocolError, msgspec.MsgspecError, RecursionError) as e:
                    log.warning("closed a connection: no message of this protocol: %s", e)
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
            answer = future.result()
            try:
                self._send(answer)
            except ValueError as e:  # No store took the embedding, and it is larger than a frame.
                self._send(EncodeRefusal(id=answer.id, reason="internal", message=str(e)))

    def _send(self, reply: Reply) -> None:
        self._writer.write(frame(self._encode(reply), limit=MAX_FRAME_BYTES))


async def _greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answering: ServiceHandshake
) -> bool:
    """Whether the engine has proved in time that it has the secret."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            challenge = answering.challenge(await read_frame(reader, limit=MAX_BYTES))
            writer.write(frame(challenge, limit=MAX_BYTES))
            answering.check(await read_frame(reader, limit=MAX_BYTES))
    except TimeoutError:
        log.warning("closed a connection: no handshake within %g s", HANDSHAKE_TIMEOUT_S)
    except (UntrustedPeer, ProtocolError, msgspec.MsgspecError, RecursionError) as e:
        log.warning("closed a connection: no engine that has this secret, or one of another version: %s", e)
    else:
        return True
    return False
