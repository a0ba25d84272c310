"""Frames of the store's and the encoder service's sockets, claims of their paths, the peer's user."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from expected_errors import expect_error

from cornplug import local_socket
from cornplug.encoder_service.formats import messages
from cornplug.encoder_service.formats.messages import DescribeRequest
from cornplug.errors import ConfigError, ProtocolError, SocketInUse
from cornplug.local_socket import (
    FrameBuffer,
    SocketClaim,
    encode_frame,
    foreign_peer_uid,
    pop_frame,
    receive_frame,
)
from cornplug.store import messages as store_messages
from cornplug.store.base import (
    NO_LOCATION,
    PayloadLocation,
    PurgeCount,
    PurgeRule,
    Reservation,
    WriterPart,
    encode_location,
)
from cornplug.store.store_stats import NamespaceStat, StoreStat

GOLDEN = json.loads((Path(__file__).parent / "golden" / "frames.json").read_text())
KEY, META, NONCE, PROOF = b"k" * 32, b"meta", b"n" * 32, b"p" * 32
AT = PayloadLocation(b"a" * 16, 128, 65, 7, 3)
STORE = {
    "ClientHello": (
        store_messages.ClientHello(store_messages.PROTOCOL_VERSION, store_messages.secret_tag(b"s" * 32)),
        None,
    ),
    "ContainsRequest": (store_messages.ContainsRequest(KEY * 2), 1),
    "TakeLeases": (store_messages.LeaseRequest(KEY, 2.5), 2),
    "ReserveRequest": (
        store_messages.ReserveRequest(KEY, [65], "app", WriterPart(b"g" * 16, 1, 2)),
        3,
    ),
    "ReserveRequest, only seen": (store_messages.ReserveRequest(KEY, [65], "app", None, True), 3),
    "CommitRequest": (store_messages.CommitRequest([9], [META]), 4),
    "ReleaseRequest": (store_messages.ReleaseRequest([9, 10]), 0),
    "DeleteRequest": (store_messages.DeleteRequest(KEY), 5),
    "StatRequest": (store_messages.StatRequest(), 6),
    "PurgeRequest": (store_messages.PurgeRequest(PurgeRule("app", 2.5, 0.5, True), True), 6),
    "DaemonWelcome": (store_messages.DaemonWelcome(b"a" * 16, 1 << 30, 5), None),
    "ContainsReply": (store_messages.ContainsReply(b"\1\0"), 1),
    "LeaseReply": (store_messages.LeaseReply(9, [META, None], encode_location(AT) + NO_LOCATION), 2),
    "ReserveReply": (store_messages.ReserveReply([Reservation(9, KEY, AT), "full"]), 3),
    "CommitReply": (store_messages.CommitReply([True, False]), 4),
    "DeleteReply": (store_messages.DeleteReply(1), 5),
    "StatReply": (store_messages.StatReply(StoreStat(1, 2, 3, 4, 5, {"app": 6}, 7, 8, 9, 10)), 6),
    "StatReply, namespaces": (
        store_messages.StatReply(
            StoreStat(
                1,
                2,
                3,
                4,
                5,
                {},
                7,
                8,
                9,
                10,
                found=11,
                absent=12,
                namespaces={"chat": NamespaceStat(1, 2, 3, 4, 5, {"full": 6}, {"evicted": 7})},
            )
        ),
        6,
    ),
    "PurgeReply": (store_messages.PurgeReply(PurgeCount(1, 2, 3, 4), True), 6),
    "ClientRejected": (store_messages.ClientRejected("secret", "why"), None),
    "RequestFault": (store_messages.RequestFault("why"), 7),
}
ENCODER: dict[str, msgspec.Struct] = {  # the version is a field: another one changes one byte
    "EngineHello": messages.EngineHello(version=2, nonce=NONCE),
    "ServiceChallenge": messages.ServiceChallenge(version=2, nonce=b"m" * 32, proof=PROOF),
    "EngineProof": messages.EngineProof(proof=PROOF),
    "DescribeRequest": DescribeRequest(version=2),
}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(5)
    yield left, right
    left.close()
    right.close()


def claim(path: Path, wait_s: float = 0.0) -> SocketClaim:
    return SocketClaim(path, setting="store.socket", wait_s=wait_s)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


# -- frames --


def test_frame_every_store_message_has_its_golden_bytes() -> None:
    assert {name: store_messages.frame(*message).hex() for name, message in STORE.items()} == GOLDEN["store"]


def test_frame_encoder_messages_have_their_golden_bytes() -> None:
    made = {name: encode_frame(msgspec.msgpack.encode(m), limit=1024).hex() for name, m in ENCODER.items()}
    assert made == GOLDEN["encoder"]


def test_frame_body_over_limit_is_an_error() -> None:
    assert encode_frame(b"abc", limit=3) == b"\3\0\0\0abc"
    with pytest.raises(ValueError, match="4 bytes, the limit is 3"):
        encode_frame(b"abcd", limit=3)


def test_take_frame_byte_by_byte_gives_each_body_once() -> None:
    buffer, bodies = bytearray(), []
    for byte in encode_frame(b"one", limit=9) + encode_frame(b"second", limit=9) + b"\5\0":
        buffer.append(byte)
        if (body := pop_frame(buffer, limit=9)) is not None:
            bodies.append(body)
    assert bodies == [b"one", b"second"]
    assert bytes(buffer) == b"\5\0"


@pytest.mark.parametrize("size", [0, 10, 0xFFFFFFFF])
def test_take_frame_length_out_of_bounds_is_a_protocol_error(
    size: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    head = struct.pack("<I", size)

    with pytest.raises(ProtocolError, match=f"{size} bytes, must be between 1 and 9"):
        pop_frame(bytearray(head), limit=9)
    for _ in range(2):
        pair[1].sendall(head)
    with pytest.raises(ProtocolError):
        receive_frame(pair[0], limit=9)
    with pytest.raises(ProtocolError):
        list(FrameBuffer(limit=9).receive(pair[0]))


def test_receive_frame_end_inside_a_frame_is_a_reset(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.sendall(encode_frame(b"whole", limit=9) + b"\5\0\0\0cut")
    right.shutdown(socket.SHUT_WR)
    assert receive_frame(left, limit=9) == b"whole"
    with pytest.raises(ConnectionResetError):
        receive_frame(left, limit=9)


def test_frame_buffer_descriptors_arrive_in_order_and_are_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    sender, receiver = FrameBuffer(limit=1 << 20), FrameBuffer(limit=1 << 20, max_fds=4)
    fds = [os.memfd_create(name) for name in ("a", "b", "c")]
    inodes = [os.fstat(fd).st_ino for fd in fds]
    for number, fd in enumerate([None, *fds]):
        sender.add(number, bytes([number]) * (1 << 10), fd)
    assert sender.unsent_bytes == 4 * (4 + (1 << 10))
    assert sender.drop({2, 9}) == {2}
    sender.send(right)
    assert sender.unsent_bytes == 0
    received = []
    while len(received) < 3:
        received += [body[0] for body in receiver.receive(left)]
    assert received == [0, 1, 3]
    received_fds = [receiver.take_fd() for _ in range(2)]
    assert [os.fstat(one).st_ino for one in received_fds] == [inodes[0], inodes[2]]
    assert not any(map(os.get_inheritable, received_fds))
    with pytest.raises(ProtocolError):
        receiver.take_fd()
    for one in received_fds:
        os.close(one)
    kept = [link for link in map(_memfd_name, os.listdir("/proc/self/fd")) if link in ("a", "b", "c")]
    assert kept == [], "the sender has closed its own"


def _memfd_name(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)")
    return ""


def test_frame_buffer_dropped_frame_is_not_sent_once_begun_it_is(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    right.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    right.setblocking(False)
    buffer = FrameBuffer(limit=1 << 20)
    for number, body in enumerate([b"a" * (1 << 19), b"b" * 9, b"c" * 9]):
        buffer.add(number, body)
    buffer.send(right)
    assert buffer.unsent_bytes > 0
    buffer.drop({0, 1})
    received = FrameBuffer(limit=1 << 20)
    bodies: list[bytes] = []
    while len(bodies) < 2:
        bodies += received.receive(left)
        buffer.send(right)
    assert bodies == [b"a" * (1 << 19), b"c" * 9]
    assert buffer.unsent_bytes == 0


# -- the peer --


def test_foreign_user_own_process_is_none_another_is_its_uid(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert foreign_peer_uid(pair[0]) is None
    mine = os.getuid()
    monkeypatch.setattr(local_socket.os, "getuid", lambda: mine + 1)
    assert foreign_peer_uid(pair[0]) == mine


# -- claims --


def test_socket_claim_folder_and_socket_are_private_to_this_user(short_path: Path) -> None:
    path = short_path / "deep" / "s.sock"
    mask = os.umask(0)
    try:
        held = claim(path)
    finally:
        os.umask(mask)
    modes = [stat.S_IMODE(f.stat().st_mode) for f in (path.parent, path, path.with_name("s.sock.lock"))]
    assert modes == [0o700, 0o600, 0o600]
    held.close()


def test_socket_claim_path_of_a_live_process_is_taken(short_path: Path) -> None:
    first = claim(short_path / "s.sock")
    with expect_error(SocketInUse, field="store.socket"):
        claim(short_path / "s.sock")
    assert answers(short_path / "s.sock"), "the second one touched nothing"
    first.close()
    claim(short_path / "s.sock").close()


def test_socket_claim_socket_of_a_dead_process_is_replaced(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_path / "s.sock"))
    held = claim(short_path / "s.sock")
    assert answers(short_path / "s.sock")
    held.close()
    assert not (short_path / "s.sock").exists()


def test_socket_claim_path_too_long_for_a_socket_is_an_error(short_path: Path) -> None:
    with expect_error(ConfigError, field="store.socket"):
        claim(short_path / ("x" * 200))


def test_socket_claim_folder_moved_away_is_taken_anew(short_path: Path) -> None:
    path = short_path / "run" / "s.sock"
    held = claim(path)
    path.parent.rename(short_path / "elsewhere")
    with pytest.raises(SocketInUse):
        # Its inode is the same, wherever the folder went.
        claim(short_path / "elsewhere" / "s.sock")
    assert held.renew() is held.listener
    assert answers(path)
    held.close()
    assert not path.exists()
    assert (short_path / "elsewhere" / "s.sock").exists(), "a name that is no longer the claim's stays"


def test_socket_claim_folder_gone_serves_connected_clients_on(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = short_path / "run" / "s.sock"
    held = claim(path)
    path.parent.rename(short_path / "elsewhere")
    path.parent.write_text("a file is in the way")
    listener = held.listener
    assert [held.renew(), held.renew()] == [listener, listener]
    assert caplog.text.count("new clients cannot connect") == 1
    path.parent.unlink()
    assert held.renew() is not listener
    held.close()


def test_socket_claim_renewed_names_stay_young_for_cleaners(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(short_path / "s.sock")
    files = [short_path, short_path / "s.sock", short_path / "s.sock.lock"]
    for path in files:
        os.utime(path, (1, 1))
    monkeypatch.setattr(local_socket, "_REFRESH_S", 0.0)
    held.renew()
    assert all(time.time() - path.stat().st_mtime < 60 for path in files)
    held.close()
