"""Client that engines use for the encoder service on this host. A separate thread has one connection. Does
not need torch.

`submit` never blocks. It returns a future that is done by the request's deadline, even if the service hangs
or dies.

    submit ──> outbox ──> [thread: select] ──> service
    future <── pending by id <──────────────── replies in any order

Requests are sent only after the service has proved that it has the secret (`formats/messages.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from cornplug.encoder_service.formats.engine_inputs import SharedMemory, share_inputs
from cornplug.encoder_service.formats.messages import (
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_REQUEST_FRAME_BYTES,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    EngineHandshake,
    Reply,
    Request,
    ServedModel,
    check_user,
)
from cornplug.errors import EncoderError, EncoderRefused, EncoderUnavailable, ProtocolError
from cornplug.local_socket import FrameBuffer, encode_frame

BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Pauses in seconds between attempts to reach a service. The last pause is repeated."""
THREAD_MARGIN_S: Final = 5.0
"""Seconds that a caller waits for the client's thread beyond the deadline."""
MAX_OUTBOX_BYTES: Final = 512 << 20
"""Number of unsent bytes above which requests fail immediately. Otherwise a stopped service could make this
process run out of memory."""
MAX_UNANSWERED_BYTES: Final = 2 << 30
"""Maximum number of bytes of inputs in shared memory that the service may still use. Above this limit,
requests fail immediately. A late request's memory counts until the service has replied or disconnected."""
_MAX_UNANSWERED: Final = 512
"""Maximum number of requests whose inputs the service may still use. The kernel limits the descriptors in a
socket's buffer."""

Result = EncodeReply | DescribeReply


class SocketEncoder:
    """Client for the service's unix socket. Thread-safe. Call `close`, or use it in `with`.

    Futures fail with EncoderRefused (the service's reason) or with EncoderUnavailable. The reasons of
    EncoderUnavailable are "encoder_down", "encoder_timeout", "encoder_bad_response", "encoder_version", and
    "encoder_untrusted" if the listener belongs to another user or does not have `secret`. If no service runs,
    futures fail immediately, and the thread tries to connect about every second.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        self._path = path
        self._secret = secret
        self._lock = threading.Lock()
        self._frames = FrameBuffer(limit=MAX_REQUEST_FRAME_BYTES, receive_limit=MAX_FRAME_BYTES)
        self._pending: dict[int, tuple[Future[Result], float]] = {}
        self._shared_bytes: dict[int, int] = {}
        """Bytes of the inputs in shared memory, by the id of a request without a reply."""
        self._describe_ids: set[int] = set()
        self._ids = itertools.count(1)
        self._last_id = 0
        self._socket: socket.socket | None = None
        self._connect_error: EncoderUnavailable | None = None
        """Error of the last attempt to connect. Requests fail with this error until an attempt succeeds."""
        self._closed = False
        self._decode = msgspec.msgpack.Decoder(Reply).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="cornplug-encoder", daemon=True)
        self._thread.start()

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        """Send one request. This client chooses the request's `id`. Returns when it has copied the request's
        inputs to shared memory, which takes milliseconds for large images."""
        refusal = self.refusal
        memory: SharedMemory | None = None
        if refusal is None:
            try:
                request, memory = share_inputs(request)
            except (OSError, ValueError) as e:
                refusal = EncoderRefused(f"inputs: {e}", reason="bad_input")
        if refusal is not None:
            failed: Future[EncodeReply] = Future()
            failed.set_exception(refusal)
            return failed
        # For an EncodeRequest, `_handle_reply` sets only an EncodeReply as the future's result.
        return cast("Future[EncodeReply]", self._enqueue(request, request.deadline_s, memory))

    def describe(self, deadline_s: float) -> tuple[ServedModel, ...]:
        """Return the served models. Waits up to `deadline_s`. Raises EncoderUnavailable."""
        # The thread completes the future by its deadline. The margin is for a machine with high load.
        described = cast(
            DescribeReply, self._enqueue(DescribeRequest(), deadline_s).result(deadline_s + THREAD_MARGIN_S)
        )
        return described.models

    @property
    def connected(self) -> bool:
        """Whether this client is connected to a service that has proved that it has the secret."""
        return self._socket is not None

    @property
    def refusal(self) -> EncoderError | None:
        """Error with which a request would fail immediately, or None if the request would be sent."""
        with self._lock:
            return self._immediate_error()

    def close(self) -> None:
        """Fail pending requests with "encoder_down" and end the thread."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join(timeout=THREAD_MARGIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _enqueue(
        self, request: Request, deadline_s: float, memory: SharedMemory | None = None
    ) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            number = next(self._ids)
            self._last_id = number
            problem = self._immediate_error()
            if problem is None:
                if isinstance(request, EncodeRequest):
                    request = msgspec.structs.replace(request, id=number)
                else:
                    self._describe_ids.add(number)
                try:
                    self._frames.add(number, self._encode(request), None if memory is None else memory.fd)
                    if memory is not None:
                        self._shared_bytes[number], memory = memory.size_bytes, None
                    self._pending[number] = (future, time.monotonic() + deadline_s)
                except ValueError as e:
                    problem = EncoderRefused(f"inputs: {e}", reason="bad_input")
        if memory is not None:
            os.close(memory.fd)
        if problem is not None:
            _fail(future, problem)
        else:
            self._wake()
        return future

    def _immediate_error(self) -> EncoderError | None:
        if self._closed:
            return self._down_error("no service responds")
        if self._connect_error is not None:
            return EncoderUnavailable(str(self._connect_error), reason=self._connect_error.reason)
        shared = self._shared_bytes
        if (
            self._frames.unsent_bytes > MAX_OUTBOX_BYTES
            or len(shared) >= _MAX_UNANSWERED
            or sum(shared.values()) > MAX_UNANSWERED_BYTES
        ):
            return EncoderUnavailable(
                f"the service at {self._path} does not read from its socket", reason="encoder_timeout"
            )
        return None

    def _down_error(self, why: str) -> EncoderUnavailable:
        return EncoderUnavailable(
            f"{why} at {self._path}; start it with: cornplug encoder --model ...", reason="encoder_down"
        )

    def _untrusted_error(self, why: EncoderUnavailable) -> EncoderUnavailable:
        return EncoderUnavailable(f"{self._path}: {why}", reason=why.reason)

    def _run(self) -> None:
        attempt = 0
        while not self._closed:
            asking = EngineHandshake(self._secret)
            sock = self._connect(asking)
            served = False
            if isinstance(sock, EncoderUnavailable):
                error = sock
            else:
                error = self._run_connection(sock, asking)
                with self._lock:
                    served, self._socket = self._socket is not None, None
                sock.close()
            # Requests fail immediately until the service has been verified.
            self._fail_all(error, refuse=not served)
            if not served:
                self._sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            if error.reason != "encoder_down":
                # A service that sent a bad response would send it again, so do not retry in a tight loop.
                self._sleep(BACKOFF_S[-1])
        self._fail_all(self._down_error("this client was closed"), refuse=True)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _connect(self, handshake: EngineHandshake) -> socket.socket | EncoderUnavailable:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # `connect` would block indefinitely if a stopped service's backlog is full.
        sock.settimeout(1.0)
        try:
            sock.connect(str(self._path))
            check_user(sock)
            # The hello fits into the buffer of a new connection.
            sock.sendall(encode_frame(handshake.create_hello(), limit=MAX_HANDSHAKE_BYTES))
        except EncoderUnavailable as e:
            sock.close()
            return self._untrusted_error(e)
        except OSError:
            sock.close()
            return self._down_error("no service responds")
        sock.setblocking(False)
        return sock

    def _run_connection(self, sock: socket.socket, handshake: EngineHandshake) -> EncoderUnavailable:
        """Send and receive until the connection ends. Return the error that ended it."""
        give_up_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while not self._closed:
                with self._lock:
                    trusted = self._socket is not None
                    writing = trusted and self._frames.unsent_bytes > 0
                selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))
                timeout_s = self._next_deadline_s()
                if not trusted:
                    left_s = give_up_s - time.monotonic()
                    if left_s <= 0:
                        return self._down_error("no handshake in time")
                    timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
                for key, events in selector.select(timeout_s):
                    if key.fileobj is self._wake_receiver:
                        self._drain_wakes()
                        continue
                    try:
                        if events & selectors.EVENT_WRITE:
                            with self._lock:
                                self._frames.send(sock)
                        if events & selectors.EVENT_READ:
                            for body in self._frames.receive(sock):
                                self._handle_frame(sock, handshake, body)
                    except EncoderUnavailable as e:
                        return self._untrusted_error(e)
                    except (ProtocolError, msgspec.MsgspecError, RecursionError) as e:
                        return EncoderUnavailable(
                            f"{self._path} does not use the encoder's protocol: {e}",
                            reason="encoder_bad_response",
                        )
                    except OSError as e:
                        return self._down_error(f"the service disconnected ({e.strerror or e})")
                self._expire_requests()
        return self._down_error("this client was closed")

    def _handle_frame(self, sock: socket.socket, handshake: EngineHandshake, body: bytes) -> None:
        if self._socket is not None:
            self._handle_reply(self._decode(body))
            return
        sock.sendall(encode_frame(handshake.create_proof(body), limit=MAX_HANDSHAKE_BYTES))
        with self._lock:
            self._socket, self._connect_error = sock, None

    def _handle_reply(self, reply: Reply) -> None:
        if isinstance(reply, DescribeReply):
            # A DescribeReply has no id, so it completes all pending DescribeRequests.
            with self._lock:
                asked = [self._pending.pop(n)[0] for n in self._describe_ids if n in self._pending]
                self._describe_ids.clear()
            for future in asked:
                _succeed(future, reply)
            return
        with self._lock:
            self._shared_bytes.pop(reply.id, None)
            found = self._pending.pop(reply.id, None)
            if found is None and not 0 < reply.id <= self._last_id:
                raise ProtocolError(f"reply to unknown request id {reply.id}")
        if found is None:
            return  # The reply is late. The future has already failed.
        if isinstance(reply, EncodeRefusal):
            _fail(found[0], EncoderRefused(reply.message, reason=reply.reason))
        else:
            _succeed(found[0], reply)

    def _next_deadline_s(self) -> float | None:
        with self._lock:
            if not self._pending:
                return None
            return max(0.0, min(deadline for _, deadline in self._pending.values()) - time.monotonic())

    def _expire_requests(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = {n for n, (_, deadline) in self._pending.items() if deadline <= now}
            # Also drop requests that the caller has cancelled, so that they are not sent.
            gone = {n for n, (future, _) in self._pending.items() if future.cancelled()} - late
            expired = [self._pending.pop(n)[0] for n in late]
            for n in gone:
                del self._pending[n]
            if late or gone:
                for n in self._frames.drop(late | gone):
                    self._shared_bytes.pop(n, None)
                self._describe_ids -= late | gone
        for future in expired:
            _fail(
                future,
                EncoderUnavailable(f"no reply from {self._path} in time", reason="encoder_timeout"),
            )

    def _fail_all(self, error: EncoderUnavailable, *, refuse: bool) -> None:
        with self._lock:
            self._connect_error = error if refuse else None
            failed = [future for future, _ in self._pending.values()]
            self._pending.clear()
            self._describe_ids.clear()
            self._shared_bytes.clear()
            self._frames.clear()
        for future in failed:
            _fail(future, error)

    def _sleep(self, seconds: float) -> None:
        """Wait for `seconds`, or until `close`. Requests that are submitted during the wait still end by
        their deadlines."""
        end = time.monotonic() + seconds
        while not self._closed and (left := end - time.monotonic()) > 0:
            deadline = self._next_deadline_s()
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                if selector.select(left if deadline is None else min(left, deadline)):
                    self._drain_wakes()
            self._expire_requests()

    def _wake(self) -> None:
        # An error means that the buffer is full, so the thread wakes up anyway, or that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass


def _succeed(future: Future[Result], result: Result) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[Result], error: EncoderError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
