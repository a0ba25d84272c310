"""`mooncake://`: a far store that keeps records as objects of a Mooncake cluster, through a process with
Mooncake's client.

    daemon ──requests (`client_process.py`)──> this module's process ──> master, and hosts with segments

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
from urllib.parse import urlsplit

import mooncake  # noqa: F401  # its absence is known before a process starts
import msgspec
from pydantic import BaseModel, ByteSize

from cornplug.errors import ConfigError
from cornplug.store.far.client_process import FarReply, FarRequest, ProcessFarStore, read_settings, serve
from cornplug.store.far.open_far import label_of, parse_query

MAX_RECORD_BYTES: Final = 32 << 20
_BUFFER_BYTES: Final = 4 * MAX_RECORD_BYTES
"""Size in bytes of the memory for records in transfer. It is enough for two reads and one write, and for the
gaps between them."""
_SETUP_TIMEOUT_S: Final = 10
"""Time limit of setup and of shutdown in seconds, after which the process is killed."""
_NOT_FOUND_CODE: Final = -704
_SETTING: Final = "store.far"
_PORT: Final = 50051


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


class _Options(BaseModel, extra="forbid"):
    """Options in the query of a URL."""

    metadata: str = "P2PHANDSHAKE"
    segment: ByteSize = ByteSize(0)
    device: str = ""
    host: str = ""


def open_mooncake_url(url: str) -> ProcessFarStore:
    """Open mooncake://MASTER[:PORT][?segment=SIZE&device=NAME&host=ADDRESS&metadata=URL]. A process is
    started and connects in the background. Raises ConfigError if the URL is invalid."""
    parts = urlsplit(url)
    try:
        if not parts.hostname or parts.path.strip("/"):
            raise ValueError("it must be the address of one master, without a path")
        master = f"{parts.hostname}:{parts.port or _PORT}"
        options = parse_query(url, _Options)
    except ValueError as e:
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {e}",
            f"Use mooncake://master:{_PORT}?segment=512MiB. Other options: device, host, metadata.",
        ) from e  # fmt: skip
    settings = ClientSettings(master, options.metadata, int(options.segment), options.device, options.host)
    return ProcessFarStore(
        "cornplug.store.far.mooncake_client", settings, max_bytes=MAX_RECORD_BYTES,
        variables={"MC_LOG_LEVEL": "ERROR"},  # log only errors, unless the operator sets another level
    )  # fmt: skip


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
