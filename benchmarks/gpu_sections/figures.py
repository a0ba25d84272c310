"""Figures of one section, written with each new figure: a killed section leaves what it has."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

_EXCERPT_CHARACTERS: Final = 6000


class Figures:
    """What a section measures, in `file`.

    Args:
        rehearse: Whether this is a rehearsal without a GPU: every code path, at sizes that say nothing.
        seconds: Time that the section is given.
    """

    def __init__(self, file: Path, *, rehearse: bool, seconds: float) -> None:
        self.rehearse = rehearse
        self._file = file
        self._ends = time.monotonic() + seconds
        self._figures: dict[str, Any] = {}
        self._failures: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        """Whether a step has failed."""
        return bool(self._failures)

    @property
    def left_s(self) -> float:
        """Seconds until the section is stopped."""
        return self._ends - time.monotonic()

    def add(self, name: str, value: Any) -> None:
        """Add a figure, print it, and write the file."""
        self._figures[name] = value
        print(f"  {name}: {value}", flush=True)
        self._write()

    def fail(self, step: str, why: str) -> None:
        """Note that a step failed, with the end of `why`."""
        self._failures[step] = why[-_EXCERPT_CHARACTERS:]
        print(f"  {step} FAILED: {why}", flush=True)
        self._write()

    def step(self, name: str) -> Step:
        """A block whose failure is a figure: the section goes on behind it."""
        return Step(self, name)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"figures": self._figures, "failures": self._failures}, indent=1) + "\n")
        draft.rename(self._file)


class Step:
    """Context of one step; it notes the step's seconds, or its failure."""

    def __init__(self, figures: Figures, name: str) -> None:
        self._figures, self._name, self._began = figures, name, time.monotonic()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._figures.add(f"{self._name}, s", round(time.monotonic() - self._began, 1))
        # SystemExit is how a benchmark rejects a measurement. The runner's SIGTERM is a KeyboardInterrupt.
        elif isinstance(error, Exception | SystemExit):
            self._figures.fail(self._name, "".join(traceback.format_exception(error)))
        return isinstance(error, Exception | SystemExit)
