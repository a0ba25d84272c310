"""A server between a store and its Valkey server: it changes records on their way, and keeps all it hears."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Mapping
from typing import BinaryIO, Final

WAYS: Final = ("flip", "swap", "truncate", "replay")


class RecordProxy:
    """Speaks RESP 2. Answers to GETRANGE are changed in the way `how`; "": none is."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._chance = random.Random(1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.how = ""
        self.older: Mapping[bytes, bytes] = {}
        """Name -> a record that the server once had there, to be replayed."""
        self.changed = 0
        self.heard = bytearray()
        self._last = b""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            socket.create_connection(("127.0.0.1", self._server_port)) as server,
            client.makefile("rb") as questions,
            server.makefile("rb") as answers,
            contextlib.suppress(OSError, EOFError),
        ):
            while True:
                question, words = _message(questions)
                server.sendall(question)
                answer, _ = _message(answers)
                with self._lock:
                    self.heard += question + answer
                    if words[0] == b"GETRANGE" and self.how:
                        answer = self._changed(words[1], answer)
                client.sendall(answer)

    def _changed(self, name: bytes, answer: bytes) -> bytes:
        length, _, rest = answer.partition(b"\r\n")
        record = bytearray(rest[: int(length[1:])])
        if not record:
            return answer
        match self.how:
            case "flip":
                record[self._chance.randrange(len(record))] ^= 1 << self._chance.randrange(8)
            case "truncate":
                del record[1 + self._chance.randrange(len(record) - 1) :]
            case "swap":
                # The record of the question before, which was for another name.
                record, self._last = bytearray(self._last or record[::-1]), bytes(record)
            case "replay":
                record = bytearray(self.older[name])
        self.changed += 1
        return b"$%d\r\n%b\r\n" % (len(record), record)


def _message(stream: BinaryIO) -> tuple[bytes, list[bytes]]:
    """One message of RESP as it is, and the strings in it. Raises EOFError."""
    line = stream.readline()
    if not line:
        raise EOFError
    kind, head = line[:1], line[1:-2]
    if kind == b"$" and int(head) >= 0:
        body = stream.read(int(head) + 2)
        return line + body, [body[:-2]]
    words: list[bytes] = []
    if kind == b"*":
        for _ in range(int(head)):
            part, strings = _message(stream)
            line += part
            words += strings
    return line, words
