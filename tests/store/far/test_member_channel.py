"""Messages of members: only a member's own, new, in their order and direction, are taken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from cornplug.store.far.nixl_client import MAX_MESSAGE_BYTES, MemberChannel

KEY = b"k" * 32
Pair = tuple[MemberChannel, MemberChannel]


def channels(one: socket.socket, other: socket.socket, *, keys: tuple[bytes, bytes] = (KEY, KEY)) -> Pair:
    """An asker and a listener over two ends."""
    made: dict[bool, MemberChannel] = {}

    def make(end: socket.socket, key: bytes, asks: bool) -> None:
        made[asks] = MemberChannel(end, key, is_client=asks, within_s=10)

    other_side = threading.Thread(target=make, args=(other, keys[1], False))
    other_side.start()
    make(one, keys[0], True)
    other_side.join()
    return made[True], made[False]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = channels(*tcp_pair())
    yield made
    for channel in made:
        channel.close()


class Between:
    """The way between two channels, held by somebody who sees and sends messages of both."""

    def __init__(self) -> None:
        asker, self._to_asker = tcp_pair()
        self._to_listener, listener = tcp_pair()
        near, far = Connection(self._to_asker.detach()), Connection(self._to_listener.detach())
        self.asker_side, self.listener_side = near, far
        passing = threading.Thread(target=self._pass_nonces)
        passing.start()
        self.asker, self.listener = channels(asker, listener)
        passing.join()

    def _pass_nonces(self) -> None:
        self.listener_side.send_bytes(self.asker_side.recv_bytes())
        self.asker_side.send_bytes(self.listener_side.recv_bytes())


def test_member_channel_messages_arrive_in_their_order_in_both_directions(pair: Pair) -> None:
    asker, listener = pair
    for number in range(3):
        asker.send(b"question %d" % number)
        assert listener.receive(10) == b"question %d" % number
        listener.send(b"answer %d" % number * 1000)
        assert asker.receive(10) == b"answer %d" % number * 1000


def test_member_channel_other_secret_is_refused() -> None:
    asker, listener = channels(*tcp_pair(), keys=(KEY, b"o" * 32))
    asker.send(b"question")
    with pytest.raises(PermissionError, match="not have this domain's secret"):
        listener.receive(10)


@pytest.mark.parametrize("byte", [0, 15, 16, -1])
def test_member_channel_changed_message_is_refused(byte: int) -> None:
    between = Between()
    between.asker.send(b"question")
    message = bytearray(between.asker_side.recv_bytes())
    message[byte] ^= 1
    between.listener_side.send_bytes(message)
    with pytest.raises(PermissionError):
        between.listener.receive(10)


@pytest.mark.parametrize("way", ["repeated", "reflected", "in another order", "cut"])
def test_member_channel_message_at_another_time_or_place_is_refused(way: str) -> None:
    between = Between()
    between.asker.send(b"one")
    between.asker.send(b"two")
    one, two = between.asker_side.recv_bytes(), between.asker_side.recv_bytes()
    victim = between.listener
    if way == "repeated":
        between.listener_side.send_bytes(one)
        assert victim.receive(10) == b"one"
        between.listener_side.send_bytes(one)
    elif way == "reflected":
        victim = between.asker
        between.asker_side.send_bytes(one)
    elif way == "in another order":
        between.listener_side.send_bytes(two)
    else:
        between.listener_side.send_bytes(one[:10])
    with pytest.raises(PermissionError):
        victim.receive(10)


def test_member_channel_larger_message_ends_the_connection_unread() -> None:
    between = Between()
    between.listener_side.send_bytes(bytes(MAX_MESSAGE_BYTES + 17))
    with pytest.raises(OSError, match="bad message length"):
        between.listener.receive(10)


def test_member_channel_silence_ends_at_the_deadline_and_lets_others_work_meanwhile(pair: Pair) -> None:
    asker, _ = pair
    turns: list[None] = []
    with pytest.raises(TimeoutError, match=r"no message within 0\.05 s"):
        asker.receive(0.05, lambda: turns.append(None), 0.001)
    assert turns


def test_member_channel_peer_that_says_nothing_is_given_up() -> None:
    one, _other = tcp_pair()
    with pytest.raises(TimeoutError):
        MemberChannel(one, KEY, is_client=True, within_s=0.05)
