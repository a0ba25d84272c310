"""Start a store on this host if none is running.

The daemon is independent of its clients: it has its own session, no inherited descriptors, and a log file
next to the socket. It ends automatically some time after its last client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import cornplug
from cornplug.config import Config, StoreConfig, portable
from cornplug.local_socket import try_lock
from cornplug.private_paths import open_file, open_folder

IDLE_EXIT_S: Final = 600.0
_SPAWN_S: Final = 20.0
"""Time limit in seconds for the process that starts the daemon. That process returns when the daemon's
interpreter has started, which is before the daemon accepts clients."""
LOG_BYTES: Final = 1 << 20
"""Size beyond which the log of an auto-started daemon is emptied."""

# The daemon's module is run directly. It starts in a third of the time that cornplug's command line takes,
# and a broken optional package cannot prevent its start. cornplug's folder is last on the module search path,
# and the engine's folder is not on it, so that a user's secrets.py does not replace the standard library's
# module.
_START: Final = (
    "import json, sys; sys.path.append(sys.argv.pop(1)); "
    "from cornplug.store.daemon.main import main; sys.exit(main(sys.argv[1:], json.load(sys.stdin)))"
)

_log = logging.getLogger("cornplug.store")


@contextlib.contextmanager
def start_lock(socket_path: Path) -> Iterator[bool]:
    """Lock the start of a daemon, and yield whether this client holds the lock and may start a daemon.

    Raises ConfigError if other users have access to the socket's folder, and OSError if no file can be
    created.
    """
    folder = open_folder(socket_path.parent, setting="store.socket")
    try:
        fd = open_file(folder, socket_path.name + ".start", os.O_RDWR)
    finally:
        os.close(folder)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def log_path(socket_path: Path) -> Path:
    """Return the path of the log of a daemon that was started automatically."""
    return socket_path.with_suffix(".log")


def _log_file(path: Path) -> BinaryIO:
    folder = open_folder(path.parent, setting="store.socket")
    try:
        fd = open_file(folder, path.name, os.O_WRONLY | os.O_APPEND)
    finally:
        os.close(folder)
    if os.fstat(fd).st_size > LOG_BYTES:
        os.ftruncate(fd, 0)
    return os.fdopen(fd, "ab")


def spawn(config: StoreConfig, *, idle_exit_s: float) -> None:
    """Start a daemon and return. The daemon is ready a moment later, or logs why it failed.

    Raises OSError if no process can be created, and ConfigError if other users have access to the socket's
    folder.
    """
    command = [sys.executable, "-P", "-c", _START, str(Path(cornplug.__file__).parents[1])]
    command += ["--clamp", "--detach", "--idle-exit-s", str(idle_exit_s)]
    # The socket is on the command line so that users who list the processes can see it.
    command += ["--socket", str(config.socket.absolute())]
    # The settings are not on the command line, which any user can read: a URL may have a password.
    settings = json.dumps(portable(Config(store=config))).encode()
    path = log_path(config.socket)
    with _log_file(path) as log:
        try:
            done = subprocess.run(
                command, input=settings, stdout=log, stderr=log, timeout=_SPAWN_S, cwd="/",
                start_new_session=True, close_fds=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            _log.warning("starting a store took more than %.0f s, see %s", _SPAWN_S, path)
            return
    if done.returncode:
        _log.warning("the store did not start (exit status %d), see %s", done.returncode, path)
    else:
        _log.info("started a store at %s; it logs to %s", config.socket, path)
