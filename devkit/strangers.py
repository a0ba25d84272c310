"""A listener at an encoder's path that answers every request: for tests of the clients' trust."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from cornplug.encoder_service.formats.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    DescribeReply,
    EncodeReply,
    ServiceHandshake,
    WireTensor,
)
from cornplug.local_socket import encode_frame, receive_frame

NOBODY: Final = 65534
BODY: Final = b"\x66" * 96
"""What it says that an image's embedding is."""


@contextmanager
def listener(path: Path, *, secret: bytes, uid: int | None = None) -> Iterator[Callable[[], bytes]]:
    """Listen at `path`, as user `uid` (for root only), and answer each request with `ENCODE_BODY`.

    Yields a function that returns all bytes that clients have sent.
    """
    heard = bytearray()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    if uid is None:
        listening.listen()
    else:
        # The kernel keeps the credentials of the process that began to listen, wherever the descriptor goes
        # later.
        path.chmod(0o777)
        os.seteuid(uid)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
    connections: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                connections.append(listening.accept()[0])
                threading.Thread(target=_serve, args=(connections[-1], secret, heard), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield lambda: bytes(heard)
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in connections:
            connection.close()
        path.unlink(missing_ok=True)


def _serve(connection: socket.socket, secret: bytes, heard: bytearray) -> None:
    answering = ServiceHandshake(secret)
    with suppress(OSError):
        while True:
            body = receive_frame(connection, limit=MAX_FRAME_BYTES)
            heard += body
            message: dict[str, Any] = msgspec.msgpack.decode(body)
            if (answer := _answer(message, body, answering)) is not None:
                connection.sendall(encode_frame(answer, limit=MAX_FRAME_BYTES))


def _answer(message: dict[str, Any], body: bytes, answering: ServiceHandshake) -> bytes | None:
    match message["type"]:
        case "hello":
            return answering.create_challenge(body)
        case "describe":
            return msgspec.msgpack.encode(DescribeReply(version=PROTOCOL_VERSION, models=()))
        case "encode":
            return msgspec.msgpack.encode(
                EncodeReply(
                    id=message["id"],
                    key=message["key"],
                    origin="computed",
                    stored=False,
                    tensor=WireTensor(dtype="float32", shape=(4, 6), data=BODY),
                    service_time_s=0.1,
                )
            )
    return None
