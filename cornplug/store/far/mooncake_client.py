"""A process with Mooncake's client, that answers its daemon's questions (`client_process.py`).

Its setup and its end hold the interpreter's lock: 90 s where the master is dead, measured with release
0.3.13. In the daemon's own process they would hold up every engine of the host.

Usage: mooncake_client.py DESCRIPTOR ... < SETTINGS
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from cornplug.store.far.client_process import Answer, Question, client_settings, serve

MOST_BYTES: Final = 32 << 20
_BUFFER_BYTES: Final = 4 * MOST_BYTES
"""Records on their way: two that are read and one that is written, and what lies between them."""
_LONGEST_S: Final = 10
"""Of setup, and of the end: the process is killed then."""
_ABSENT: Final = -704


class ClientSettings(msgspec.Struct, frozen=True):
    """How a client joins its Mooncake cluster."""

    master: str
    """HOST:PORT."""
    metadata: str
    segment_bytes: int
    """Memory of this host that the cluster gets."""
    device: str
    """RDMA device; empty: TCP."""
    host: str
    """Address of this host for the others; empty: the one from which it reaches the master."""


def main(settings: ClientSettings, descriptors: Sequence[int]) -> None:
    """Answer until the daemon's ends of all sockets are closed."""
    try:
        # Not above: the daemon, which imports this module too, does without the library.
        from mooncake.store import MooncakeDistributedStore
    except ImportError as e:
        sys.exit(f"cornplug: cannot import Mooncake's client: {e}. On Debian, run: apt install libibverbs1")
    signal.alarm(_LONGEST_S)
    client = MooncakeDistributedStore()
    code = client.setup(
        settings.host or _own_address(settings.master), settings.metadata, settings.segment_bytes,
        _BUFFER_BYTES, "rdma" if settings.device else "tcp", settings.device, settings.master,
    )  # fmt: skip
    if code:
        sys.exit(f"cornplug: Mooncake's client of {settings.master} did not start: error {code}")
    signal.alarm(0)
    serve(functools.partial(_answer, client), descriptors)
    # The end takes 2 s, and what reads the daemon's log is not to wait for it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    signal.alarm(_LONGEST_S)
    client.close()


def _own_address(master: str) -> str:
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        address: str = probe.getsockname()[0]
    return address


def _answer(client: Any, question: Question) -> Answer:
    names = list(question.names)
    match question.call:
        case "exists":
            codes = client.batch_is_exist(names)
            return _unless_failed(codes, Answer(there=[code == 1 for code in codes]))
        case "get":
            # Empty for a name that it does not have, and for a master that does not answer.
            record = client.get(names[0])
            return Answer(record=record) if record else _unless_failed([client.get_size(names[0])], Answer())
        case "put":
            # `put` would leave an older record in its place.
            return _unless_failed([client.upsert(names[0], question.record)], Answer())
        case "delete":
            # By force: without it a record that was read within 10 s stays.
            return _unless_failed(client.batch_remove(names, True), Answer())


def _unless_failed(codes: Sequence[int], answer: Answer) -> Answer:
    code = next((code for code in codes if code < 0 and code != _ABSENT), 0)
    return Answer(failure=f"Mooncake's error {code}") if code else answer


if __name__ == "__main__":
    main(client_settings(ClientSettings), [int(number) for number in sys.argv[1:]])
