"""Unix socket server for this user's engines on this host: a handshake, then frames of `formats/messages.py`.

A connection that sends invalid bytes is closed. Other connections are not affected. When a client
disconnects, its requests are cancelled, so that no tower runs for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.messages import (
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    PROTOCOL_VERSION,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeRequest,
    Reply,
    Request,
    ServiceHandshake,
    UntrustedPeer,
)
from cornplug.errors import ProtocolError
from cornplug.local_socket import encode_frame, foreign_peer_uid, read_frame, read_frame_length

_LARGE_BYTES: Final = 256 << 10
"""Size in bytes above which a frame is decoded on a separate thread."""
_MAX_LARGE_FRAMES: Final = 4
"""Maximum number of large frames (at most MAX_FRAME_BYTES each) in memory at a time, over all connections."""
FRAME_TIMEOUT_S: Final = 30.0
"""Maximum seconds to receive a large frame. An engine that stops in the middle of a frame occupies one of the
`_MAX_LARGE_FRAMES` slots no longer than this."""

log = logging.getLogger(__name__)


class UnixServer:
    """Server that accepts engines' connections on a unix socket and replies to their requests."""

    def __init__(self, encoder: EncoderCore, listener: socket.socket, *, secret: bytes) -> None:
        self._encoder = encoder
        self._secret = secret
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._frames = _FrameReader()

    async def start(self) -> None:
        """Start accepting connections."""
        # Duplicate the descriptor, because `SocketClaim` closes the original when it recreates the socket.
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener.dup())

    async def replace_listener(self, listener: socket.socket) -> None:
        """Accept new connections on `listener` instead. Open connections continue."""
        if listener is not self._listener:
            before, self._listener = self._server, listener
            await self.start()
            if before is not None:
                before.close()

    def stop_accepting(self) -> None:
        """Stop accepting new connections. Open connections continue."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close every connection."""
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
            if (uid := foreign_peer_uid(writer.get_extra_info("socket"))) is not None:
                log.warning("refused a connection from user %d", uid)
                return
            if not await _shake_hands(reader, writer, ServiceHandshake(self._secret)):
                return
            await _Connection(self._encoder, self._frames, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has disconnected.
        except asyncio.CancelledError:
            pass  # `close` cancelled the task. asyncio (3.11) would log a cancelled task as an error.
        finally:
            writer.close()


class _FrameReader:
    """Reads requests from all connections, and limits the memory for large frames. Use it from one event
    loop."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._large = asyncio.Semaphore(_MAX_LARGE_FRAMES)
        self._threads = ThreadPoolExecutor(1, "cornplug-frames")

    async def read_request(self, reader: asyncio.StreamReader) -> Request:
        """Read the next request from a connection.

        Raises ProtocolError, msgspec.MsgspecError and RecursionError for invalid bytes, and
        IncompleteReadError at the end of the stream.
        """
        size = await read_frame_length(reader, limit=MAX_FRAME_BYTES)
        if size <= _LARGE_BYTES:
            return self._decode(await reader.readexactly(size))
        async with self._large:
            try:
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    body = await reader.readexactly(size)
            except TimeoutError:
                raise ProtocolError(
                    f"a frame of {size} bytes did not arrive within {FRAME_TIMEOUT_S:g} s"
                ) from None
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
        self._pending: set[Future[EncodeResult]] = set()

    async def run(self) -> None:
        try:
            while True:
                try:
                    request = await self._frames.read_request(self._reader)
                except (ProtocolError, msgspec.MsgspecError, RecursionError) as e:
                    log.warning("closed a connection: invalid message: %s", e)
                    return
                self._handle_request(request)
                # Read no further requests until the client has read its replies.
                await self._writer.drain()
        finally:
            for future in tuple(self._pending):
                future.cancel()

    def _handle_request(self, request: DescribeRequest | EncodeRequest) -> None:
        if isinstance(request, DescribeRequest):
            self._send(DescribeReply(version=PROTOCOL_VERSION, models=self._encoder.registry.served_models()))
            return
        future = self._encoder.submit(request)
        self._pending.add(future)
        future.add_done_callback(self._on_result)

    def _on_result(self, future: Future[EncodeResult]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_result, future)

    def _send_result(self, future: Future[EncodeResult]) -> None:
        self._pending.discard(future)
        if not future.cancelled() and not self._writer.is_closing():
            reply = future.result()
            try:
                self._send(reply)
            except ValueError as e:  # The embedding is not in a store and is larger than a frame.
                self._send(EncodeRefusal(id=reply.id, reason="internal", message=str(e)))

    def _send(self, reply: Reply) -> None:
        self._writer.write(encode_frame(self._encode(reply), limit=MAX_FRAME_BYTES))


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handshake: ServiceHandshake
) -> bool:
    """Return whether the engine has proved in time that it has the secret."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            challenge = handshake.create_challenge(await read_frame(reader, limit=MAX_HANDSHAKE_BYTES))
            writer.write(encode_frame(challenge, limit=MAX_HANDSHAKE_BYTES))
            handshake.check_proof(await read_frame(reader, limit=MAX_HANDSHAKE_BYTES))
    except TimeoutError:
        log.warning("closed a connection: no handshake within %g s", HANDSHAKE_TIMEOUT_S)
    except (UntrustedPeer, ProtocolError, msgspec.MsgspecError, RecursionError) as e:
        log.warning("closed a connection: the engine has another secret or another protocol version: %s", e)
    else:
        return True
    return False
