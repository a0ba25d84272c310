"""Engines' path over a real socket: answers, joins, death, silence and garbage on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import httpx
import msgspec
import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.config import load
from cornplug.encoder_service.client import unix_client
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats import engine_inputs
from cornplug.encoder_service.formats.engine_inputs import share_inputs
from cornplug.encoder_service.formats.messages import (
    MAX_FRAME_BYTES,
    MAX_REQUEST_FRAME_BYTES,
    PROTOCOL_VERSION,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    EngineHandshake,
    Reply,
    ServiceChallenge,
    ServiceHandshake,
)
from cornplug.encoder_service.unix_server import UnixServer
from cornplug.errors import EncoderError, EncoderRefused, EncoderUnavailable
from cornplug.local_socket import SocketClaim, receive_frame
from cornplug.private_paths import read_secret

from .conftest import SECRET, MakeEncoder, Requests, eventually, sample_image, waiting_for_batch
from .execution.test_encoder import Gate, passes
from .test_hostile_bodies import messages

__all__ = ["gate"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def serve(short_path: Path) -> Iterator[Callable[[EncoderCore], Path]]:
    """Run endpoints in an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    endpoints: list[UnixServer] = []
    claims: list[SocketClaim] = []

    def start(encoder: EncoderCore) -> Path:
        path = short_path / f"e{len(endpoints)}.sock"
        claims.append(SocketClaim(path, setting="encoder.socket"))
        endpoint = UnixServer(encoder, claims[-1].listener, secret=SECRET)
        asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result(30)
        endpoints.append(endpoint)
        return path

    yield start
    for endpoint in endpoints:
        asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result(30)
    for claim in claims:
        claim.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def reason(future: Future[EncodeReply], within_s: float = 40) -> str:
    error = future.exception(within_s)
    assert isinstance(error, EncoderError)
    return error.reason


def test_client_describe_and_encode_by_socket(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    llava_pair: tuple[Path, Path],
) -> None:
    encoder = make_encoder()
    with SocketEncoder(serve(encoder), SECRET) as client:
        assert client.describe(20) == encoder.registry.served_models()
        futures = [client.submit(request_for(p, s)) for s in range(6) for p in llava_pair]
        answers = [f.result(20) for f in futures]
        assert all(a.tensor is not None for a in answers)
        assert [a.key for a in answers] == [request_for(p, s).key for s in range(6) for p in llava_pair]
        assert passes(encoder) == 6
        with expect_error(EncoderRefused, reason="bad_input", match="pixel_values"):
            client.submit(request_for(llava_pair[0], 1, inputs={})).result(20)
        assert client.connected


def test_server_vanished_client_is_not_computed_for(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    gate: Gate,
) -> None:
    encoder = make_encoder()
    path = serve(encoder)
    with SocketEncoder(path, SECRET) as stays, SocketEncoder(path, SECRET) as leaves:
        held = stays.submit(request_for(llava_pair[0], 1))
        assert gate.entered.wait(20)
        gone = leaves.submit(request_for(llava_pair[0], 2))
        eventually(lambda: waiting_for_batch(encoder) == 1)
        leaves.close()
        assert reason(gone) == "encoder_down"
        eventually(lambda: encoder.count_waiting() == 1)
        gate.open.set()
        held.result(10)
    assert passes(encoder) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", MAX_REQUEST_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 2) + msgspec.msgpack.encode({})[:1] + b"\xff",
        struct.pack("<I", 1) + b"\xc1",
    ],
)
def test_server_garbage_closes_that_connection_only(
    data: bytes,
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    qwen: Path,
) -> None:
    path = serve(make_encoder())
    with SocketEncoder(path, SECRET) as client, socket.socket(socket.AF_UNIX) as stranger:
        client.describe(20)
        stranger.connect(str(path))
        stranger.sendall(data)
        stranger.settimeout(30)
        assert stranger.recv(100) == b""
        assert client.submit(request_for(qwen, 1)).result(10).origin == "computed"


def test_client_without_service_fails_at_once_then_recovers(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    qwen: Path,
    short_path: Path,
    within: TimeLimits,
) -> None:
    client = SocketEncoder(short_path / "e0.sock", SECRET)
    with within(15):
        assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"
        assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"
        with pytest.raises(EncoderUnavailable, match="cornplug encoder"):
            client.describe(30)
    serve(make_encoder())
    eventually(lambda: client.connected)
    client.submit(request_for(qwen, 1)).result(10)
    client.close()
    assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"


class Impostor:
    """A listener that calls the test's function for each connection."""

    def __init__(self, path: Path, act: Callable[[socket.socket], None]) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.act = act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.act(connection)


def frame(reply: Reply) -> bytes:
    data = msgspec.msgpack.encode(reply)
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "encoder_bad_response"),
        (struct.pack("<I", 0), "encoder_bad_response"),
        (struct.pack("<I", 4) + b"\xff\xff\xff\xff", "encoder_bad_response"),
        (
            frame(
                EncodeReply(id=999, key=b"k", origin="computed", stored=True, tensor=None, service_time_s=0)
            ),
            "encoder_bad_response",
        ),
        (struct.pack("<I", 100) + b"only the beginning", "encoder_timeout"),
        (b"", "encoder_timeout"),
    ],
)
def test_client_garbage_of_service_is_a_bad_response(
    answer: bytes, want: str, short_path: Path, request_for: Requests, qwen: Path
) -> None:
    kept: list[socket.socket] = []

    def act(connection: socket.socket) -> None:
        kept.append(connection)
        connection.sendall(answer)

    impostor = Impostor(short_path / "i.sock", act)
    with SocketEncoder(impostor.path, SECRET) as client:
        if want == "encoder_timeout":
            assert reason(client.submit(request_for(qwen, 1, deadline_s=0.2))) == want
        else:
            # The garbage may come before our first request: then the next connection's does.
            reasons = {reason(client.submit(request_for(qwen, 1, deadline_s=30))) for _ in range(2)}
            assert reasons == {want}
    impostor.listener.close()
    for connection in kept:
        connection.close()


def test_client_service_of_other_version_is_refused(short_path: Path) -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(1000)
        data = msgspec.msgpack.encode(ServiceChallenge(version=99, nonce=bytes(32), proof=bytes(32)))
        connection.sendall(struct.pack("<I", len(data)) + data)

    impostor = Impostor(short_path / "i.sock", act)
    with SocketEncoder(impostor.path, SECRET) as client, pytest.raises(EncoderUnavailable) as e:
        client.describe(20)
    assert e.value.reason == "encoder_version"
    impostor.listener.close()


class RealService:
    """`cornplug encoder` as a separate process."""

    def __init__(self, folder: Path, models: list[Path], *flags: str) -> None:
        self.socket = folder / "e.sock"
        self.secret = read_secret(load().store.secret_file)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        command = [sys.executable, "-m", "cornplug.encoder_service.server", "--dtype", "float32"]
        command += ["--device", "cpu", "--no-store", "--threads", "1", "--port", str(self.port)]
        command += ["--socket", str(self.socket), *(a for m in models for a in ("--model", str(m))), *flags]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        eventually(self._up, 240)

    def _up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def real(short_path: Path, llava_pair: tuple[Path, Path]) -> Iterator[RealService]:
    service = RealService(short_path, list(llava_pair))
    yield service
    service.end()


@pytest.mark.more
def test_server_process_survives_sigstop_and_drains(
    real: RealService, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    request: EncodeRequest = request_for(llava_pair[0], 1)
    with SocketEncoder(real.socket, real.secret) as client:
        assert [m.hidden_size for m in client.describe(20)] == [64, 96]
        first = client.submit(request).result(30)
        with EncoderClient(f"http://127.0.0.1:{real.port}") as http:
            ref = http.encode(sample_image(1), model=str(llava_pair[1]))
            # Another model, the same tower, the same pixels: its features were kept.
            assert (ref.shape, ref.origin) == ((16, 96), "cached")
        assert "2 models, 1 tower, 2 projectors" in real.log.read_text()

        real.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        futures = [client.submit(request_for(llava_pair[0], s, deadline_s=4.0)) for s in range(40)]
        assert time.monotonic() - started < 3.5
        assert {reason(f) for f in futures} == {"encoder_timeout"}
        assert time.monotonic() - started < 20, "one after the other takes minutes"
        with pytest.raises(EncoderUnavailable):
            client.describe(0.2)
        real.process.send_signal(signal.SIGCONT)
        assert client.submit(request).result(30).tensor == first.tensor

        real.process.send_signal(signal.SIGTERM)
        assert real.process.wait(20) == 0, real.log.read_text()
        assert not real.socket.exists()
        eventually(lambda: not client.connected)
        assert reason(client.submit(request)) == "encoder_down"


@pytest.mark.more
def test_client_service_killed_fails_running_requests(
    real: RealService, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    with SocketEncoder(real.socket, real.secret) as client:
        client.describe(20)
        real.process.send_signal(signal.SIGSTOP)
        pending = client.submit(request_for(llava_pair[0], 1))
        eventually(lambda: client._frames.unsent_bytes == 0)
        real.process.kill()
        assert reason(pending, 20) == "encoder_down"


def test_client_connection_closed_fails_running_requests(
    short_path: Path, request_for: Requests, qwen: Path, within: TimeLimits
) -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.close()

    impostor = Impostor(short_path / "i.sock", act)
    with SocketEncoder(impostor.path, SECRET) as client, within(15):
        assert reason(client.submit(request_for(qwen, 1, deadline_s=30))) == "encoder_down"
    impostor.listener.close()


def test_describe_request_encodes_type_and_version() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(DescribeRequest())) == {
        "type": "describe",
        "version": PROTOCOL_VERSION,
    }


@contextlib.contextmanager
def trusted(path: Path) -> Iterator[socket.socket]:
    """A connection of an engine that has the secret, and then sends what it likes."""
    engine = EngineHandshake(SECRET)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        send(sock, engine.create_hello())
        challenge = receive_frame(sock, limit=MAX_FRAME_BYTES)
        send(sock, engine.create_proof(challenge))
        yield sock


def send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(struct.pack("<I", len(body)) + body)


def test_server_message_of_too_many_values_closes_its_connection(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path]
) -> None:
    """Before: the event loop made objects of all of them, for minutes where they filled a frame."""
    path = serve(make_encoder())
    with SocketEncoder(path, SECRET) as client:
        for message in messages(1 << 20).values():
            with trusted(path) as sock, contextlib.suppress(ConnectionError):
                send(sock, message)
                assert sock.recv(1) == b""
        assert client.describe(20)
        assert client.connected


def test_server_frame_above_the_limit_closes_its_connection(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path]
) -> None:
    """Large inputs arrive in shared memory, so the event loop never reads a large frame."""
    path = serve(make_encoder())
    with SocketEncoder(path, SECRET) as client:
        with trusted(path) as sock:
            sock.sendall(struct.pack("<I", MAX_REQUEST_FRAME_BYTES + 1))
            assert sock.recv(1) == b""
        assert client.describe(20)


@pytest.mark.parametrize("kind", ["no_memory", "short", "not_sealable", "beyond", "negative", "other_file"])
def test_server_bad_shared_inputs_close_their_connection(
    kind: str,
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    qwen: Path,
) -> None:
    encoder = make_encoder()
    path = serve(encoder)
    request, memory = share_inputs(request_for(qwen, 1))
    assert memory is not None
    (name, place), *_ = request.shared.items()
    if kind == "short":
        os.ftruncate(memory.fd, memory.size_bytes - 64)
    elif kind == "not_sealable":
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    elif kind in ("beyond", "negative"):
        offset = memory.size_bytes if kind == "beyond" else -64
        shared = {**request.shared, name: msgspec.structs.replace(place, offset=offset)}
        request = msgspec.structs.replace(request, shared=shared)
    with SocketEncoder(path, SECRET) as client, open("/dev/zero", "rb") as zero:
        assert client.submit(request_for(qwen, 2)).result(40).origin == "computed"
        eventually(lambda: encoder.count_waiting() == 0)
        open_before = len(os.listdir("/proc/self/fd"))
        body = msgspec.msgpack.encode(request)
        fds = {"no_memory": [], "other_file": [zero.fileno()]}.get(kind, [memory.fd])
        with trusted(path) as sock:
            socket.send_fds(sock, [struct.pack("<I", len(body)) + body], fds)
            assert sock.recv(1) == b""
        assert client.submit(request_for(qwen, 1)).result(40).origin == "computed"
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= open_before)
    os.close(memory.fd)


def test_server_descriptors_without_frames_close_their_connection(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path]
) -> None:
    path = serve(make_encoder())
    with SocketEncoder(path, SECRET) as client, trusted(path) as sock, open("/dev/zero", "rb") as zero:
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                socket.send_fds(sock, [b"\x09"], [zero.fileno()])
            assert sock.recv(1) == b""
        assert client.describe(20)


def test_client_sends_the_bytes_of_large_inputs_in_memory(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    qwen: Path,
) -> None:
    """The results are those of inputs in the request itself, and nothing stays open."""
    encoder = make_encoder()
    request = request_for(qwen, 3)
    assert share_inputs(request)[1] is not None, "this test needs a large input"
    direct = encoder.submit(msgspec.structs.replace(request, key=b"d" * 32)).result(40)
    with SocketEncoder(serve(encoder), SECRET) as client:
        assert client.describe(20)
        open_before = len(os.listdir("/proc/self/fd"))
        found = client.submit(request).result(40)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= open_before)
    assert isinstance(direct, EncodeReply)
    assert found.tensor is not None
    assert found.tensor == direct.tensor


def test_client_that_is_not_connected_shares_no_memory(
    short_path: Path, request_for: Requests, qwen: Path
) -> None:
    with SocketEncoder(short_path / "none.sock", SECRET) as client:
        eventually(lambda: client.refusal is not None)
        with mock.patch.object(unix_client, "share_inputs") as share:
            assert reason(client.submit(request_for(qwen, 1))) == "encoder_down"
        share.assert_not_called()


def test_client_refuses_inputs_above_the_limit(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    request_for: Requests,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_inputs, "MAX_SHARED_BYTES", 100)
    with SocketEncoder(serve(make_encoder()), SECRET) as client:
        assert client.describe(20)
        assert reason(client.submit(request_for(qwen, 1))) == "bad_input"
        assert client.connected


@pytest.mark.parametrize("limit", ["MAX_UNANSWERED_BYTES", "_MAX_UNANSWERED"])
def test_client_bounds_the_memory_of_a_service_that_does_not_reply(
    limit: str,
    short_path: Path,
    request_for: Requests,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that are late still count, because the service may map their memory. Replies end that."""
    monkeypatch.setattr(unix_client, limit, 3)
    requests, release = request_for(qwen, 1, deadline_s=0.05), threading.Event()

    def act(connection: socket.socket) -> None:
        service = ServiceHandshake(SECRET)
        send(connection, service.create_challenge(receive_frame(connection, limit=1 << 20)))
        service.check_proof(receive_frame(connection, limit=1 << 20))
        release.wait(60)
        for number in range(1, 2 if limit == "MAX_UNANSWERED_BYTES" else 4):
            refusal = EncodeRefusal(id=number, reason="too_late", message="")
            send(connection, msgspec.msgpack.encode(refusal))

    impostor = Impostor(short_path / "i.sock", act)
    with SocketEncoder(impostor.path, SECRET) as client:
        eventually(lambda: client.connected)
        sent = 1 if limit == "MAX_UNANSWERED_BYTES" else 3
        for _ in range(sent):
            assert reason(client.submit(requests)) == "encoder_timeout"
        assert client.refusal is not None
        with mock.patch.object(unix_client, "share_inputs") as share:
            assert reason(client.submit(requests)) == "encoder_timeout"
        share.assert_not_called()
        release.set()
        eventually(lambda: client.refusal is None)
    impostor.listener.close()
