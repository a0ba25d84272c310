"""Sections one after the other, each in a process of its own and with a time limit.

A section that fails, crashes or hangs does not stop the next. Each leaves OUT/NAME.json as it finishes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"
_PR_SET_CHILD_SUBREAPER: Final = 36
_GRACE_S: Final = 25.0
"""Time between SIGTERM, upon which a section stops its engines, and SIGKILL."""
_LEAST_S: Final = 15.0
"""A section is not started with less time than this."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section, and the most seconds that it is given."""

    name: str
    limit_s: float
    summary: str


Command = Callable[[Section, Path, float], Sequence[str]]
"""The command of a section, which writes its figures into a file and ends within so many seconds."""


def run(
    sections: Sequence[Section], out: Path, budget_s: float, command: Command, about: Mapping[str, Any]
) -> dict[str, str]:
    """Run the sections within `budget_s` seconds. Returns each one's status.

    Args:
        about: What each file says besides, as the machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Engines of a killed section become children of this process, so that it finds them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ends = time.monotonic() + budget_s
    statuses = {}
    for section in sections:
        left_s = ends - time.monotonic() - _GRACE_S
        limit_s = min(section.limit_s, left_s)
        file = out / f"{section.name}.json"
        file.unlink(missing_ok=True)
        print(f"\n=== {section.name}: {section.summary}", flush=True)
        began = time.monotonic()
        status, why = NOT_RUN, "no time is left"
        if left_s >= _LEAST_S:
            status, why = _run_one(command(section, file, limit_s), limit_s)
        outcome = {"section": section.name, "status": status, "seconds": round(time.monotonic() - began, 1)}
        _finish(file, {**outcome, "limit_s": round(limit_s, 1), **about}, why)
        print(f"=== {section.name}: {status} in {outcome['seconds']} s {why}".rstrip(), flush=True)
        statuses[section.name] = status
    return statuses


def _run_one(argv: Sequence[str], limit_s: float) -> tuple[str, str]:
    """How a section's process ended: its status, and why it did not pass."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as e:
        return FAILED, f"could not be started: {e}"
    try:
        code = process.wait(limit_s)
        return (PASSED, "") if code == 0 else (FAILED, f"ended with status {code}")
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"stopped after {limit_s:.0f} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the section if it still runs, and then whatever it has left behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    while left := _children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.append(int(stat.parent.name))
    return found


def _finish(file: Path, about: Mapping[str, Any], why: str) -> None:
    """Add to a section's figures how it ended."""
    try:
        left = json.loads(file.read_text())
    except (OSError, ValueError):  # it ended before its first figure
        left = {"figures": {}, "failures": {}}
    if why:
        left["failures"]["section"] = why
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({**about, **left}, indent=1) + "\n")
    draft.rename(file)
