"""`mooncake://`: records as objects of a Mooncake cluster, by a process with Mooncake's client.

    thread ──question──> idle socket ──> mooncake_client.py ──> master, and hosts with segments

A process that hangs or dies is replaced by another one for the next question.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import mooncake  # noqa: F401  # its absence is known before a process starts
import msgspec
from pydantic import BaseModel, ByteSize, ValidationError

from cornplug.errors import ConfigError
from cornplug.store.far.far_store import FarFailure, label_of
from cornplug.store.far.mooncake_client import MOST_BYTES, Answer, ClientSettings, Question

_SETTING: Final = "store.far"
_PORT: Final = 50051
_CHANNELS: Final = 4
"""Threads of a far peer that call."""
_LONGEST_S: Final = 6
"""Of a call. One to a dead master takes 4.5 s, and the client finds a new master by itself."""


class MooncakeFarStore:
    """One cluster."""

    most_bytes = MOST_BYTES
    most_names = 1024

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client = _Client(settings)

    def exists(self, names: Sequence[str]) -> list[bool]:
        return list(self._ask(Question("exists", names)).there)

    def get(self, name: str) -> bytes | None:
        return self._ask(Question("get", [name])).record

    def put(self, name: str, record: bytes) -> None:
        self._ask(Question("put", [name], record))

    def delete(self, names: Sequence[str]) -> None:
        self._ask(Question("delete", names))

    def close(self) -> None:
        self._client.leave()

    def _ask(self, question: Question) -> Answer:
        with self._lock:
            if self._client.ended:
                self._client = _Client(self._settings)
            client = self._client
        answer = client.ask(question)
        if answer.failure:
            raise FarFailure(answer.failure)
        return answer


class _Client:
    """The process, and its sockets that are idle."""

    def __init__(self, settings: ClientSettings) -> None:
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        theirs = []
        for _ in range(_CHANNELS):
            mine, its = socket.socketpair()
            limit = struct.pack("@ll", _LONGEST_S, 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                mine.setsockopt(socket.SOL_SOCKET, option, limit)
            self._idle.put(Connection(mine.detach()))
            theirs.append(its)
        descriptors = [its.fileno() for its in theirs]
        command = [sys.executable, "-m", "cornplug.store.far.mooncake_client"]
        command += [msgspec.json.encode(settings).decode(), *map(str, descriptors)]
        # Its errors are in the daemon's log, and no more unless the operator wants it. A signal from a
        # terminal is the daemon's.
        env = {"MC_LOG_LEVEL": "ERROR", **os.environ}
        self._process = subprocess.Popen(command, pass_fds=descriptors, env=env, start_new_session=True)
        for its in theirs:
            its.close()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: Question) -> Answer:
        """Raises FarFailure, after which the process is ended."""
        try:
            channel = self._idle.get(timeout=_LONGEST_S)
            channel.send_bytes(msgspec.msgpack.encode(question))
            answer = msgspec.msgpack.decode(channel.recv_bytes(), type=Answer)
        except (OSError, EOFError, Empty) as e:
            self._process.kill()
            self._process.wait()
            raise FarFailure(f"Mooncake's client: {type(e).__name__} {e}") from None
        self._idle.put(channel)
        return answer

    def leave(self) -> None:
        """Close the idle sockets: the process gives its segment back, and ends by itself."""
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().close()


class _Options(BaseModel, extra="forbid"):
    """The query of a URL."""

    metadata: str = "P2PHANDSHAKE"
    segment: ByteSize = ByteSize(0)
    device: str = ""
    host: str = ""


def open_mooncake_url(url: str) -> MooncakeFarStore:
    """The store of mooncake://MASTER[:PORT][?segment=SIZE&device=NAME&host=ADDRESS&metadata=URL]. Its process
    begins to connect. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        if not parts.hostname or parts.path.strip("/"):
            raise ValueError("it names no master, or more than one")
        master = f"{parts.hostname}:{parts.port or _PORT}"
        options = _Options.model_validate(dict(parse_qsl(parts.query, strict_parsing=bool(parts.query))))
    except ValueError as e:
        why = e.errors()[0] if isinstance(e, ValidationError) else None
        problem = f"{why['loc'][0]!r}: {why['msg']}" if why else str(e)
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {problem}",
            f"Write it as mooncake://master:{_PORT}?segment=512MiB; other fields: device, host, metadata.",
        ) from e  # fmt: skip
    return MooncakeFarStore(
        ClientSettings(master, options.metadata, int(options.segment), options.device, options.host)
    )
