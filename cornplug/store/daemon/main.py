"""`cornplug serve-store`: run the store daemon. There is one daemon per host and socket.

A lock file next to the socket decides which process serves (`local_socket.py`). Only the process with the
lock replaces a socket that a dead daemon left behind.

Clients cannot fill the disk with the daemon's log. Repeated lines are dropped, and the log file of a daemon
that an engine started is emptied when it is large.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from cornplug import config
from cornplug.errors import ConfigError, SocketInUse
from cornplug.local_socket import SocketClaim
from cornplug.private_paths import read_secret
from cornplug.settings import parse_size_argument
from cornplug.store.arena import SharedArena, choose_store_size
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.daemon.server import OpenedTiers, ServedSocket, StoreServer
from cornplug.store.daemon_link import LOG_BYTES

if TYPE_CHECKING:
    from cornplug.store.disk.segment_files import OpenedDisk
    from cornplug.store.far.open_far import OpenedFar


MAX_LINES: Final = 10
"""Maximum number of lines of one kind within PERIOD_S. Further lines are dropped. The next line of that kind
contains the number of dropped lines.
"""
PERIOD_S: Final = 60.0
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_SOCKET_IN_USE: Final = 3
"""Exit status if another store serves this socket."""
_LOCK_WAIT_S: Final = 2.0
_DESCRIPTOR_LIMIT: Final = 65536
_log = logging.getLogger("cornplug.store")


def main(argv: list[str], starter_settings: Mapping[str, Any] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns exit status 0 after a signal, 2 for a wrong setting, and 3 if another store serves this socket.

    Args:
        starter_settings: Settings (`config.dump_portable`) of the client that starts this store. None: use
            the settings from the environment.
    """
    try:
        settings = (
            config.load() if starter_settings is None else config.load_portable(starter_settings)
        ).store
        options = store_parser(settings).parse_args(argv)
        if options.detach and os.fork():
            # The starter waits only for this process, so it does not have to reap the daemon.
            os._exit(0)
        logging.basicConfig(
            handlers=[RateLimitedHandler(sys.stderr, max_bytes=LOG_BYTES if options.detach else None)],
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(process)d %(message)s",
        )
        if options.detach:
            _reset_cpu_affinity()
        _raise_descriptor_limit()
        return _serve(options, settings)
    except ConfigError as e:
        print(f"cornplug serve-store: {e}", file=sys.stderr)
        return 2


def store_parser(defaults: config.StoreConfig) -> argparse.ArgumentParser:
    """Return the parser of `cornplug serve-store`. `defaults` are the values of flags that are not set."""
    parser = argparse.ArgumentParser(
        prog="cornplug serve-store", description="Run the store that all engines of this host share."
    )
    parser.add_argument(
        "--socket", type=Path, default=defaults.socket, help="unix socket to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        type=parse_size_argument,
        default=defaults.size_bytes,
        help="maximum size, for example 4GiB or 512MiB (default: a quarter of the available memory)",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="FOLDER",
        default=defaults.disk_path,
        help="folder on a local disk for entries that survive restarts (default: none)",
    )
    parser.add_argument(
        "--disk-size",
        type=parse_size_argument,
        metavar="SIZE",
        default=defaults.disk_size_bytes,
        help="maximum size of the files in that folder, for example 500GiB (default: half of the free space)",
    )
    parser.add_argument(
        "--far",
        action="append",
        metavar="URL",
        help="far store: file:///FOLDER, s3://BUCKET/PREFIX, valkey://HOST:6379/0, mooncake://MASTER:50051 "
        "or nixl://HOST:8760+HOST:8760; can be repeated (default: the setting store.far)",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        default=defaults.secret_file,
        help="32-byte file that must be the same for all clients (default: %(default)s)",
    )
    parser.add_argument(
        "--quarantine-s",
        type=float,
        default=defaults.quarantine_s,
        help="seconds before the memory of a writer that died is reused (default: %(default)s)",
    )
    parser.add_argument(
        "--idle-exit-s",
        type=float,
        default=0.0,
        help="exit after this many seconds without a client (default: 0, never)",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        default=defaults.metrics,
        help="address for Prometheus metrics; without HOST, on this host only (default: none)",
    )
    parser.add_argument(
        "--clamp",
        action="store_true",
        help="use a smaller size instead of failing if the host has less memory",
    )
    parser.add_argument("--detach", action="store_true", help="run in the background")
    return parser


def _serve(options: argparse.Namespace, settings: config.StoreConfig) -> int:
    if options.metrics != settings.metrics:
        settings = config.load({"store.metrics": options.metrics}).store
    path: Path = options.socket.absolute()
    secret = read_secret(options.secret_file)
    # Once the socket exists, another process can signal this one, which must then shut down properly. It is
    # not enough to block the signals, because a library's thread could receive them.
    early: list[int] = []
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda number, _: early.append(number))
    try:
        claim = SocketClaim(path, setting="store.socket", wait_s=_LOCK_WAIT_S)
    except SocketInUse:
        _log.error("another store serves %s, so this process ends", path)
        return EXIT_SOCKET_IN_USE
    try:
        _serve_claimed(claim, options, secret, settings, early)
    finally:
        claim.close()
    _log.info("ended")
    return 0


def _serve_claimed(
    claim: SocketClaim,
    options: argparse.Namespace,
    secret: bytes,
    settings: config.StoreConfig,
    early_signals: Sequence[int],
) -> None:
    """Serve until a signal. `early_signals` contains signals that have already been received."""
    arena = SharedArena(choose_store_size(options.size, clamp=options.clamp))
    disk = _open_disk(options, secret, settings)
    server = StoreServer(
        ServedSocket(claim.listener, claim.renew, options.idle_exit_s),
        arena,
        secret=secret,
        times=ReservationTimes(options.quarantine_s),
        namespaces=settings.namespaces,
        access_log=settings.access_log,
        tiers=OpenedTiers(disk, _open_far(options, secret, settings)),
    )

    endpoint = None
    if settings.metrics:
        # Imported here, so that a store without metrics starts in a third of the time.
        from cornplug.store.daemon.metrics_endpoint import open_endpoint

        endpoint = open_endpoint(settings.metrics)
        if endpoint is not None:
            server.telemetry.publish = endpoint.publish

    def end(number: int, _: object) -> None:
        _log.info("received %s, so this store ends", signal.Signals(number).name)
        server.stop = True

    # The daemon creates almost no reference cycles, and a collection would delay a request by milliseconds.
    gc.disable()
    for number in _STOP_SIGNALS:
        signal.signal(number, end)
    for come in early_signals:
        end(come, None)
    _log.info(
        "serving clients on %s, with up to %d MiB of memory", options.socket, arena.capacity_bytes >> 20
    )
    try:
        server.serve()
    finally:
        if endpoint is not None:
            endpoint.close()
        arena.close()


def _open_disk(options: argparse.Namespace, secret: bytes, settings: config.StoreConfig) -> OpenedDisk | None:
    """Open the disk that the settings select, or return None if no disk is set.

    Raises ConfigError if the disk cannot be used. A store started by an engine runs without the disk instead.
    """
    if options.disk is None:
        return None
    # Imported here, so that a store without a disk starts faster.
    from cornplug.store.disk.segment_files import open_disk

    path, size_bytes = options.disk.absolute(), options.disk_size
    try:
        disk = open_disk(path, secret, size_bytes=size_bytes, write_bytes_s=settings.disk_write_bytes_s)
    except ConfigError as e:
        if not options.detach:
            raise
        _log.error("this store runs without its disk, because the disk cannot be used: %s", e)
        return None
    _log.info("entries are also written to %s, up to %d MiB", path, disk.size_bytes >> 20)
    return disk


def _open_far(options: argparse.Namespace, secret: bytes, settings: config.StoreConfig) -> OpenedFar | None:
    """Open the far stores that the settings select, or return None if no far store is set.

    Raises ConfigError if a far store cannot be opened. A store started by an engine runs without far stores
    instead.
    """
    urls = options.far or settings.far
    if not urls:
        return None
    # Imported here, so that a store without far stores starts faster.
    from cornplug.store.far.open_far import open_far

    try:
        far = open_far(urls, secret, secret_file=options.secret_file, sealing_files=settings.far_secret_files)
    except ConfigError as e:
        if not options.detach:
            raise
        _log.error("this store shares no entries with other hosts, because a far store cannot be used: %s", e)
        return None
    _log.info("entries are shared through %s", ", ".join(label for label, _ in far.stores))
    return far


def _reset_cpu_affinity() -> None:
    """Allow this process to run on all cores of its container.

    A vLLM worker that starts the store is bound to a few cores, which it keeps busy. If the store ran only on
    these cores, a reply would take seconds.
    """
    cores = os.sysconf("SC_NPROCESSORS_CONF")
    try:
        os.sched_setaffinity(0, range(cores))
    except OSError as e:
        _log.warning("this store runs only on the cores of the process that started it: %s", e.strerror)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors, because each client needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTOR_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTOR_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Log handler that writes at most `MAX_LINES` lines of one kind per minute. Lines are of the same kind
    if they have the same logger and the same format string.

    Args:
        max_bytes: Size beyond which the log is emptied, if it is a file opened for appending. None: never.
    """

    def __init__(self, stream: TextIO, *, max_bytes: int | None = None) -> None:
        super().__init__(stream)
        self._max_bytes = max_bytes
        self._kinds: dict[tuple[str, str], _LineKind] = {}
        self.addFilter(self._should_emit)

    def emit(self, record: logging.LogRecord) -> None:
        if self._max_bytes is not None:
            fd = self.stream.fileno()
            if os.fstat(fd).st_size > self._max_bytes:
                os.ftruncate(fd, 0)
        super().emit(record)

    def _should_emit(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        kind = self._kinds.setdefault((record.name, str(record.msg)), _LineKind(now_s))
        if now_s - kind.began_s >= PERIOD_S:
            kind.began_s, kind.lines = now_s, 0
        kind.lines += 1
        if kind.lines > MAX_LINES:
            kind.dropped += 1
            return False
        if kind.dropped:
            record.msg = f"{record.getMessage()} ({kind.dropped} lines like this were left out)"
            record.args, kind.dropped = (), 0
        return True


class _LineKind:
    """Counts of log lines of one kind in the period that began at `began_s`."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.lines = self.dropped = 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
