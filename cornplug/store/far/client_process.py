"""Far stores whose client library runs in a separate process, which replies on inherited sockets.

    thread ──question──> idle socket ──> the process ──> the far store

A process that hangs or dies is replaced at the next request.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeVar

import msgspec

from cornplug.host import without_proxies
from cornplug.store.far.open_far import FarFailure

_CHANNELS: Final = 4
"""Number of sockets to the process: one for each thread of a `FarPeer` that makes calls."""
_CALL_TIMEOUT_S: Final = 6
"""Time limit of a call in seconds. With Mooncake, a call to a dead master takes 4.5 s, and Mooncake's client
then finds a new master itself."""
_START_TIMEOUT_S: Final = 60
"""Time limit for the start of the process in seconds. The process loads libraries, perhaps on busy cores."""
_READY: Final = b"ready"

Settings = TypeVar("Settings", bound=msgspec.Struct)


class FarRequest(msgspec.Struct, array_like=True):
    """Call of a `FarStore` method, as sent to the process."""

    call: Literal["exists", "get", "put", "delete"]
    names: Sequence[str]
    record: bytes = b""


class FarReply(msgspec.Struct, array_like=True):
    """Result of a call, as sent by the process. If the call failed, `failure` is the reason."""

    failure: str = ""
    there: Sequence[bool] = ()
    record: bytes | None = None


class ProcessFarStore:
    """Far store accessed through a process that runs one module.

    Args:
        module: Module to run. It reads `settings` with `read_settings`, and passes a function that handles
            calls to `serve`.
        settings: Settings of the process. They are sent to its standard input, because other users can read
            its command line.
        variables: Environment variables of the process. Values from the daemon's environment replace them.
    """

    max_names = 1024

    def __init__(
        self, module: str, settings: msgspec.Struct, *, max_bytes: int, variables: Mapping[str, str]
    ) -> None:
        self.max_bytes = max_bytes
        self._start_client = functools.partial(_Client, module, msgspec.msgpack.encode(settings), variables)
        self._lock = threading.Lock()
        self._client = self._start_client()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return list(self._call(FarRequest("exists", names)).there)

    def get(self, name: str) -> bytes | None:
        return self._call(FarRequest("get", [name])).record

    def put(self, name: str, record: bytes) -> None:
        self._call(FarRequest("put", [name], record))

    def delete(self, names: Sequence[str]) -> None:
        self._call(FarRequest("delete", names))

    def close(self) -> None:
        self._client.close()

    def _call(self, request: FarRequest) -> FarReply:
        with self._lock:
            if self._client.has_exited:
                self._client = self._start_client()
            client = self._client
        reply = client.call(request)
        if reply.failure:
            raise FarFailure(reply.failure)
        return reply


class _Client:
    """One process with the client library, and the sockets to it."""

    def __init__(self, module: str, settings: bytes, variables: Mapping[str, str]) -> None:
        self._name = module.rpartition(".")[2]
        self._idle: SimpleQueue[tuple[Connection, bool]] = SimpleQueue()
        """Idle sockets, each with a flag that is set when the process has reported that it serves the
        socket."""
        theirs = []
        for _ in range(_CHANNELS):
            mine, its = socket.socketpair()
            limit = struct.pack("@ll", _CALL_TIMEOUT_S, 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                mine.setsockopt(socket.SOL_SOCKET, option, limit)
            self._idle.put((Connection(mine.detach()), False))
            theirs.append(its)
        self._start_deadline_s = time.monotonic() + _START_TIMEOUT_S
        descriptors = [its.fileno() for its in theirs]
        # With its own session, the process does not receive a terminal's signals. Its errors go to the
        # daemon's log.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, descriptors)], stdin=subprocess.PIPE,
            pass_fds=descriptors, env={**variables, **without_proxies(os.environ)}, start_new_session=True,
        )  # fmt: skip
        for its in theirs:
            its.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as into:
            into.write(settings)

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def call(self, request: FarRequest) -> FarReply:
        """Send a call and return its result. If the call fails, raises FarFailure and kills the process,
        unless it is still starting."""
        try:
            channel, ready = self._idle.get(timeout=_CALL_TIMEOUT_S)
            if not ready:
                if not channel.poll(_CALL_TIMEOUT_S) and time.monotonic() < self._start_deadline_s:
                    self._idle.put((channel, False))
                    raise FarFailure(f"the process {self._name} has not started yet")
                channel.recv_bytes()
            channel.send_bytes(msgspec.msgpack.encode(request))
            reply = msgspec.msgpack.decode(channel.recv_bytes(), type=FarReply)
        except FarFailure:
            raise
        except (OSError, EOFError, Empty) as e:
            self._process.kill()
            self._process.wait()
            raise FarFailure(f"{self._name}: {type(e).__name__} {e}") from None
        self._idle.put((channel, True))
        return reply

    def close(self) -> None:
        """Close the idle sockets, so that the process releases its resources and ends."""
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait()[0].close()


def read_settings(settings_type: type[Settings]) -> Settings:
    """Read the settings that the daemon has sent to this process."""
    return msgspec.msgpack.decode(sys.stdin.buffer.read(), type=settings_type)


def serve(handle: Callable[[FarRequest], FarReply], descriptors: Sequence[int]) -> None:
    """Reply to the daemon's calls, with one thread per socket, until the daemon has closed all sockets."""
    threads = [
        threading.Thread(target=_serve_channel, args=(handle, Connection(descriptor)))
        for descriptor in descriptors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve_channel(handle: Callable[[FarRequest], FarReply], channel: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        channel.send_bytes(_READY)
        while True:
            question = msgspec.msgpack.decode(channel.recv_bytes(), type=FarRequest)
            channel.send_bytes(msgspec.msgpack.encode(handle(question)))
