"""A client gives the memory of a dead daemon back at once."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import weakref
from collections.abc import Callable

from cornplug.config import StoreConfig
from cornplug.errors import StoreUnavailable
from cornplug.private_paths import read_secret
from cornplug.store.connection import DaemonConnection


def test_connection_dead_daemons_memory_goes_without_a_collection(
    start_daemon: Callable[..., subprocess.Popen[str]], store_config: StoreConfig
) -> None:
    """Engines freeze what the garbage collector sees, or turn it off: a cycle keeps gigabytes there."""
    daemon = start_daemon()
    connection = DaemonConnection(store_config.socket, read_secret(store_config.secret_file), timeout_s=20)
    gc.collect()
    gc.disable()
    try:
        daemon.kill()
        daemon.wait()
        for _ in range(2):  # the second finds it ended
            with contextlib.suppress(StoreUnavailable):
                connection.release([1])
        connection.close()
        left = weakref.ref(connection)
        del connection
        assert left() is None
    finally:
        gc.enable()
