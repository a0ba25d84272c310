"""Nobody is believed for sitting at the socket's path: other users, processes without the secret, replays."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.encoder_service import unix_server
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.formats import messages
from cornplug.encoder_service.formats.messages import (
    PROTOCOL_VERSION,
    DescribeRequest,
    EncodeRequest,
    EngineHandshake,
    EngineProof,
    ServiceChallenge,
    ServiceHandshake,
    UntrustedPeer,
)
from cornplug.errors import ConfigError, EncoderUnavailable
from cornplug.local_socket import SocketClaim
from devkit.strangers import NOBODY, listener

from ..conftest import SECRET, MakeEncoder, Requests, eventually
from ..test_unix_socket import reason, serve

__all__ = ["serve"]
OTHER = b"o" * 32
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def refused(path: Path, request: EncodeRequest) -> str:
    with SocketEncoder(path, SECRET) as client:
        return reason(client.submit(msgspec.structs.replace(request, deadline_s=10.0)), 12)


@needs_root
def test_socket_encoder_listener_of_other_user_is_untrusted(
    short_path: Path, request_for: Requests, qwen: Path
) -> None:
    with listener(short_path / "e.sock", uid=NOBODY, secret=SECRET) as heard:
        assert refused(short_path / "e.sock", request_for(qwen, 1)) == "encoder_untrusted"
        assert heard() == b""


def test_socket_encoder_listener_without_secret_gets_no_pixels(
    short_path: Path, request_for: Requests, qwen: Path
) -> None:
    with listener(short_path / "e.sock", secret=OTHER) as heard:
        assert refused(short_path / "e.sock", request_for(qwen, 1)) == "encoder_untrusted"
        assert b"hello" in heard()
        assert b"pixel_values" not in heard()
    # The same listener with it is a service: so what is refused above is the secret.
    with (
        listener(short_path / "f.sock", secret=SECRET) as heard,
        SocketEncoder(short_path / "f.sock", SECRET) as c,
    ):
        assert c.submit(request_for(qwen, 1)).result(60).origin == "computed"
        assert b"pixel_values" in heard()


def test_socket_encoder_untrusted_fails_at_once_until_service_comes(
    make_encoder: MakeEncoder,
    serve: Callable[[EncoderCore], Path],
    short_path: Path,
    request_for: Requests,
    qwen: Path,
    within: TimeLimits,
) -> None:
    path = short_path / "e0.sock"
    with SocketEncoder(path, SECRET) as client:
        with listener(path, secret=OTHER):
            eventually(lambda: reason(client.submit(request_for(qwen, 1)), 12) == "encoder_untrusted")
            with within(15):
                assert reason(client.submit(request_for(qwen, 1))) == "encoder_untrusted"
            assert not client.connected
            with pytest.raises(EncoderUnavailable, match=r"store\.secret_file; use the same file"):
                client.describe(20)
        serve(make_encoder())
        eventually(lambda: client.connected)
        assert client.submit(request_for(qwen, 1)).result(60).origin == "computed"


def converse(path: Path, *messages: bytes) -> bytes:
    """What the service answers to these frames until it closes the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        got = bytearray()
        try:
            for message in messages:
                sock.sendall(struct.pack("<I", len(message)) + message)
            while data := sock.recv(4096):
                got += data
        except ConnectionError:
            pass
        return bytes(got)


def test_encoder_engine_without_secret_learns_nothing(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path]
) -> None:
    path = serve(make_encoder())
    describe = msgspec.msgpack.encode(DescribeRequest())
    assert converse(path, describe) == b""
    answer = converse(
        path, EngineHandshake(OTHER).create_hello(), msgspec.msgpack.encode(EngineProof(proof=bytes(32)))
    )
    assert b"challenge" in answer
    assert b"described" not in answer


@needs_root
def test_encoder_engine_of_other_user_learns_nothing(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path]
) -> None:
    path = serve(make_encoder())
    path.chmod(0o666)
    path.parent.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        assert converse(path, EngineHandshake(SECRET).create_hello()) == b""
    finally:
        os.seteuid(0)


def test_encoder_silent_connection_is_closed(
    make_encoder: MakeEncoder, serve: Callable[[EncoderCore], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_server, "HANDSHAKE_TIMEOUT_S", 0.2)
    path = serve(make_encoder())
    assert converse(path) == b""
    assert converse(path, b"x" * (messages.MAX_HANDSHAKE_BYTES + 1)) == b""


def test_handshake_replayed_messages_are_refused() -> None:
    first, service = EngineHandshake(SECRET), ServiceHandshake(SECRET)
    challenge = service.create_challenge(first.create_hello())
    proof = first.create_proof(challenge)
    service.check_proof(proof)
    # The service's answer, played to another connection of an engine.
    with pytest.raises(EncoderUnavailable) as e:
        EngineHandshake(SECRET).create_proof(challenge)
    assert e.value.reason == "encoder_untrusted"
    # The engine's words, played to another connection of the service.
    again = ServiceHandshake(SECRET)
    again.create_challenge(first.create_hello())
    with pytest.raises(UntrustedPeer):
        again.check_proof(proof)
    # An engine's nonce back to it as the service's, and the service's proof as the engine's.
    mirror = msgspec.msgpack.decode(first.create_hello())["nonce"]
    said = msgspec.msgpack.decode(challenge, type=ServiceChallenge)
    with pytest.raises(EncoderUnavailable):
        first.create_proof(
            msgspec.msgpack.encode(ServiceChallenge(version=said.version, nonce=mirror, proof=said.proof))
        )
    with pytest.raises(UntrustedPeer):
        service.check_proof(msgspec.msgpack.encode(EngineProof(proof=said.proof)))


@pytest.mark.parametrize("short", [b"", b"n" * 31, b"n" * 33])
def test_handshake_short_nonce_is_refused(short: bytes) -> None:
    """Else two handshakes could be cut at different places and give one proof."""
    with pytest.raises(UntrustedPeer):
        ServiceHandshake(SECRET).create_challenge(
            msgspec.msgpack.encode(messages.EngineHello(version=PROTOCOL_VERSION, nonce=short))
        )


@needs_root
def test_encoder_socket_folder_open_to_others_is_refused(short_path: Path) -> None:
    theirs, open_, link = short_path / "t", short_path / "o", short_path / "l"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    open_.mkdir()
    open_.chmod(0o777)
    (short_path / "mine").mkdir(mode=0o700)
    link.symlink_to(short_path / "mine")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    for folder in (theirs, open_, link):
        with expect_error(
            ConfigError, field="encoder.socket", match="belongs to user|is writable by|is a symbolic link"
        ):
            SocketClaim(folder / "e.sock", setting="encoder.socket")
        assert not list(folder.iterdir())
