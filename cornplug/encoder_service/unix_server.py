"""Unix socket server for this user's engines on this host: a handshake, then frames of `formats/messages.py`.

The large inputs of a request arrive in shared memory (`formats/engine_inputs.py`), whose descriptor asyncio's
streams would drop. Therefore a connection reads its socket itself, when the event loop reports that it is
readable.

A connection that sends invalid bytes is closed. Other connections are not affected. When a client
disconnects, its requests are cancelled, so that no tower runs for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import msgspec

from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats.engine_inputs import map_inputs
from cornplug.encoder_service.formats.messages import (
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_REQUEST_FRAME_BYTES,
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
from cornplug.local_socket import FrameBuffer, foreign_peer_uid

_MAX_FDS: Final = 16
"""Maximum number of descriptors that one connection may send before the end of their frames."""
_MAX_UNSENT_BYTES: Final = 64 << 10
"""Number of unsent bytes of replies above which a connection reads no further requests."""
_ACCEPT_RETRY_S: Final = 1.0
"""Pause in seconds after an error while accepting connections, for example if no descriptor is free."""

log = logging.getLogger(__name__)


class UnixServer:
    """Server that accepts engines' connections on a unix socket and replies to their requests."""

    def __init__(self, encoder: EncoderCore, listener: socket.socket, *, secret: bytes) -> None:
        self._encoder = encoder
        self._secret = secret
        self._listener = listener
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start accepting connections."""
        # Duplicate the descriptor, because `SocketClaim` closes the original when it recreates the socket.
        self._accepting = asyncio.create_task(self._accept(self._listener.dup()))

    async def replace_listener(self, listener: socket.socket) -> None:
        """Accept new connections on `listener` instead. Open connections continue."""
        if listener is not self._listener:
            self.stop_accepting()
            self._listener = listener
            await self.start()

    def stop_accepting(self) -> None:
        """Stop accepting new connections. Open connections continue."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def close(self) -> None:
        """Close every connection."""
        self.stop_accepting()
        for task in self._connections:
            task.cancel()
        tasks = [*self._connections, *([self._accepting] if self._accepting is not None else [])]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        with listener:
            while True:
                try:
                    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as e:
                    log.warning("cannot accept a connection: %s", e)
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = asyncio.create_task(self._serve(sock))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(self._encoder, sock)
        try:
            if (uid := foreign_peer_uid(sock)) is not None:
                log.warning("refused a connection from user %d", uid)
            elif await connection.shake_hands(ServiceHandshake(self._secret)):
                await connection.run()
        except OSError:
            pass  # The client has disconnected.
        finally:
            connection.close()


class _Connection:
    def __init__(self, encoder: EncoderCore, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._encoder = encoder
        self._socket = sock
        self._frames = FrameBuffer(limit=MAX_FRAME_BYTES, receive_limit=MAX_HANDSHAKE_BYTES, max_fds=_MAX_FDS)
        self._loop = asyncio.get_running_loop()
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: set[Future[EncodeResult]] = set()
        self._sent = asyncio.Event()
        self._sent.set()
        """Set while at most `_MAX_UNSENT_BYTES` are unsent."""
        self._closed = False

    async def shake_hands(self, handshake: ServiceHandshake) -> bool:
        """Return whether the engine has proved in time that it has the secret."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                self._send(handshake.create_challenge(await self._next_frame()))
                handshake.check_proof(await self._next_frame())
        except TimeoutError:
            log.warning("closed a connection: no handshake within %g s", HANDSHAKE_TIMEOUT_S)
        except (UntrustedPeer, ProtocolError, msgspec.MsgspecError, RecursionError) as e:
            log.warning(
                "closed a connection: the engine has another secret or another protocol version: %s", e
            )
        else:
            self._frames.receive_limit = MAX_REQUEST_FRAME_BYTES
            return True
        return False

    async def run(self) -> None:
        """Reply to requests until the client disconnects. Raises OSError."""
        while True:
            try:
                self._handle_request(self._decode(await self._next_frame()))
            except (ProtocolError, msgspec.MsgspecError, RecursionError) as e:
                log.warning("closed a connection: invalid message: %s", e)
                return
            # Read no further requests until the client has read its replies.
            await self._sent.wait()

    def close(self) -> None:
        """Close the connection, and cancel its requests."""
        self._closed = True
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._frames.clear()
        for future in tuple(self._pending):
            future.cancel()

    async def _next_frame(self) -> bytes:
        # Take one frame at a time, because the first frame after the handshake has another limit.
        while (body := next(self._frames.receive(self._socket), None)) is None:
            await self._wait_readable()
        return body

    async def _wait_readable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(self._socket, _set_once(ready))
        try:
            await ready
        finally:
            self._loop.remove_reader(self._socket)

    def _handle_request(self, request: DescribeRequest | EncodeRequest) -> None:
        if isinstance(request, DescribeRequest):
            models = self._encoder.registry.served_models()
            self._send(self._encode(DescribeReply(version=PROTOCOL_VERSION, models=models)))
            return
        if request.shared:
            request = map_inputs(request, self._frames.take_fd())
        future = self._encoder.submit(request)
        self._pending.add(future)
        future.add_done_callback(self._on_result)

    def _on_result(self, future: Future[EncodeResult]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_result, future)

    def _send_result(self, future: Future[EncodeResult]) -> None:
        self._pending.discard(future)
        if not future.cancelled() and not self._closed:
            reply: Reply = future.result()
            try:
                self._send(self._encode(reply))
            except ValueError as e:  # The embedding is not in a store and is larger than a frame.
                refusal = EncodeRefusal(id=future.result().id, reason="internal", message=str(e))
                self._send(self._encode(refusal))

    def _send(self, body: bytes) -> None:
        """Send a frame when the socket accepts it. Raises ValueError if it is too large."""
        self._frames.add(0, body)
        self._flush()

    def _flush(self) -> None:
        try:
            self._frames.send(self._socket)
        except OSError:
            # The client has disconnected. `run` ends when it reads the socket again.
            self._frames.clear()
        if self._frames.unsent_bytes:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)
        if self._frames.unsent_bytes > _MAX_UNSENT_BYTES:
            self._sent.clear()
        else:
            self._sent.set()


def _set_once(future: asyncio.Future[None]) -> Callable[[], None]:
    return lambda: None if future.done() else future.set_result(None)
