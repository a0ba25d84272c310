"""Start a store on this host when none answers, as sccache and ccache do.

The daemon belongs to nobody: a session of its own, no inherited descriptor, its log in a
file beside the socket. It ends by itself once nobody has used it for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cornplug.config import StoreConfig

IDLE_EXIT_S: Final = 600.0
_SPAWN_S: Final = 20.0
"""The starter returns when the daemon's interpreter has come up, not when it serves."""
_LOG_BYTES: Final = 1 << 20

_log = logging.getLogger("cornplug.store")


@contextlib.contextmanager
def start_lock(socket_path: Path) -> Iterator[bool]:
    """True for the one client of the host that may start a daemon now."""
    socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(socket_path.with_name(socket_path.name + ".start"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _try_lock(fd)
    finally:
        os.close(fd)


def log_path(socket_path: Path) -> Path:
    """Where an auto-started daemon writes."""
    return socket_path.with_suffix(".log")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def spawn(config: StoreConfig, *, idle_exit_s: float) -> None:
    """Start a daemon and return; it serves a moment later, or says in its log why not.

    Raises OSError when no process can be made."""
    # The daemon's own module rather than the whole command line: it starts in a third of the
    # time, and no optional room can keep the store from starting.
    command = [sys.executable, "-m", "cornplug.store.daemon", "--clamp", "--detach"]
    command += ["--socket", str(config.socket.absolute()), "--size", str(config.size_bytes)]
    command += ["--shm-dir", str(config.shm_dir), "--secret-file", str(config.secret_file.absolute())]
    command += ["--quarantine-s", str(config.quarantine_s), "--idle-exit-s", str(idle_exit_s)]
    path = log_path(config.socket)
    full = path.exists() and path.stat().st_size > _LOG_BYTES
    with path.open("wb" if full else "ab") as log:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_SPAWN_S,
                start_new_session=True, close_fds=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            _log.warning("starting a store took more than %.0f s; see %s", _SPAWN_S, path)
            return
    if done.returncode:
        _log.warning("a store did not start (exit status %d); see %s", done.returncode, path)
    else:
        _log.info("started a store at %s; it logs to %s", config.socket, path)
