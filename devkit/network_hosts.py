"""Two hosts of a network of their own, as network namespaces that a cable joins."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO, Final, Self

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
"""Of the hosts; each has its loopback too."""
_CLONE_NEWNET: Final = 0x40000000


class NetworkHosts:
    """A context manager: the hosts are there inside it. See `reason_against` for where they cannot be."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for _ in ADDRESSES:
                # A host's /sys has its own interfaces, which UCX looks for there.
                ready = "mount -t sysfs none /sys && echo ready && exec sleep infinity"
                command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", ready]
                self._holders.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            for holder in self._holders:
                assert holder.stdout is not None
                if holder.stdout.readline() != b"ready\n":
                    raise OSError("unshare or mount failed")
            ends = ["cable", "type", "veth", "peer", "name", "cable", "netns", str(self._holders[1].pid)]
            self._ip(0, "link", "add", *ends)
            for host, address in enumerate(ADDRESSES):
                self._ip(host, "address", "add", f"{address}/24", "dev", "cable")
                for link in ("lo", "cable"):
                    self._ip(host, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()

    def command(self, host: int, *command: str) -> list[str]:
        """A command that runs on host 0 or 1."""
        return ["nsenter", "--target", str(self._holders[host].pid), "--net", "--mount", "--", *command]

    @contextlib.contextmanager
    def entered(self, host: int) -> Iterator[None]:
        """Have this thread on host 0 or 1, and what it starts meanwhile: threads and processes."""
        with open("/proc/thread-self/ns/net") as before:
            with open(f"/proc/{self._holders[host].pid}/ns/net") as there:
                _enter(there)
            try:
                yield
            finally:
                _enter(before)

    def cut(self) -> None:
        """Pull the cable out at host 1: what host 0 sends there is neither answered nor refused."""
        self._ip(1, "link", "set", "cable", "down")

    def mend(self) -> None:
        """Put it in again."""
        self._ip(1, "link", "set", "cable", "up")

    def _ip(self, host: int, *arguments: str) -> None:
        subprocess.run(self.command(host, "ip", *arguments), check=True, capture_output=True)


def _enter(namespace: IO[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


@functools.cache
def reason_against() -> str:
    """Why this process cannot make such hosts; "" where it can."""
    missing = [program for program in ("unshare", "nsenter", "ip") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here"
    if os.getuid() != 0:
        return "network namespaces need root"
    try:
        with NetworkHosts():
            return ""
    except (subprocess.CalledProcessError, OSError) as e:
        said: Sequence[bytes] = [e.stderr] if isinstance(e, subprocess.CalledProcessError) else []
        return f"no network namespaces here: {e} {b' '.join(said).decode(errors='replace').strip()}"
