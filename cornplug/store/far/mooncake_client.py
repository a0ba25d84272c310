"""Process with Mooncake's client, which replies to the daemon's requests (`client_process.py`).

The setup and shutdown of Mooncake's client hold the interpreter's lock, for 90 s if the master is dead
(measured with release 0.3.13). In the daemon's own process they would block every engine of the host.

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

from cornplug.store.far.client_process import FarReply, FarRequest, read_settings, serve

MAX_RECORD_BYTES: Final = 32 << 20
_BUFFER_BYTES: Final = 4 * MAX_RECORD_BYTES
"""Size in bytes of the memory for records in transfer. It is enough for two reads and one write, and for the
gaps between them."""
_SETUP_TIMEOUT_S: Final = 10
"""Time limit of setup and of shutdown in seconds, after which the process is killed."""
_NOT_FOUND_CODE: Final = -704


class ClientSettings(msgspec.Struct, frozen=True):
    """Settings with which a client joins its Mooncake cluster."""

    master: str
    """Address of the master, as HOST:PORT."""
    metadata: str
    segment_bytes: int
    """Memory in bytes that this host contributes to the cluster."""
    device: str
    """Name of the RDMA device. Empty: use TCP."""
    host: str
    """Address of this host for other hosts. Empty: the address from which this host reaches the master."""


def main(settings: ClientSettings, descriptors: Sequence[int]) -> None:
    """Join the cluster, and reply to the daemon's calls until the daemon has closed all sockets."""
    try:
        # Imported here because the daemon also imports this module, and does not need the library.
        from mooncake.store import MooncakeDistributedStore
    except ImportError as e:
        sys.exit(f"cornplug: cannot import Mooncake's client: {e}. On Debian, run: apt install libibverbs1")
    signal.alarm(_SETUP_TIMEOUT_S)
    client = MooncakeDistributedStore()
    code = client.setup(
        settings.host or _own_address(settings.master), settings.metadata, settings.segment_bytes,
        _BUFFER_BYTES, "rdma" if settings.device else "tcp", settings.device, settings.master,
    )  # fmt: skip
    if code:
        sys.exit(f"cornplug: Mooncake's client for master {settings.master} did not start: error {code}")
    signal.alarm(0)
    serve(functools.partial(_handle_call, client), descriptors)
    # The shutdown takes 2 s, and a process that reads the daemon's log until its end should not wait for
    # that.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    signal.alarm(_SETUP_TIMEOUT_S)
    client.close()


def _own_address(master: str) -> str:
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        address: str = probe.getsockname()[0]
    return address


def _handle_call(client: Any, request: FarRequest) -> FarReply:
    names = list(request.names)
    match request.call:
        case "exists":
            codes = client.batch_is_exist(names)
            return _reply_or_failure(codes, FarReply(there=[code == 1 for code in codes]))
        case "get":
            # The result is empty for a name that does not exist, and if the master does not reply.
            record = client.get(names[0])
            return (
                FarReply(record=record)
                if record
                else _reply_or_failure([client.get_size(names[0])], FarReply())
            )
        case "put":
            # `put` would not replace an older record.
            return _reply_or_failure([client.upsert(names[0], request.record)], FarReply())
        case "delete":
            # Force the deletion, because otherwise a record that was read within the last 10 s stays.
            return _reply_or_failure(client.batch_remove(names, True), FarReply())


def _reply_or_failure(codes: Sequence[int], reply: FarReply) -> FarReply:
    code = next((code for code in codes if code < 0 and code != _NOT_FOUND_CODE), 0)
    return FarReply(failure=f"Mooncake's error {code}") if code else reply


if __name__ == "__main__":
    main(read_settings(ClientSettings), [int(number) for number in sys.argv[1:]])
