"""Run a command so that a signal reaches it exactly once."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple


class ChildExit(NamedTuple):
    """How a command ended."""

    status: int
    """Its exit status; 128 + N if signal N ended it."""
    interrupted: bool
    """Whether this process received SIGINT or SIGTERM while the command ran."""


def run_child(command: Sequence[str], *, env: Mapping[str, str], output: Path | None = None) -> ChildExit:
    """Run a command to its end.

    The command gets a process group of its own, and SIGINT and SIGTERM are passed on to its first process. In
    the group of this process a Ctrl-C, or a CI job that is cancelled, would interrupt pytest twice, and the
    second interrupt would end the clean-up that stops engines.
    """
    with output.open("ab") if output else nullcontext() as out:
        child = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out else None,
            process_group=0,
        )

        received = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            received.append(number)
            child.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return ChildExit(status if status >= 0 else 128 - status, bool(received))
