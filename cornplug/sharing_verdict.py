"""Verdicts on whether an engine shares a checkpoint's KV and embeddings.

A process of the engine determines the verdicts, and the doctor prints them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from cornplug.errors import CornplugError

T = TypeVar("T")

_COUNTED: Final = re.compile(r"\d+ validation errors? for ")
"""Pattern for the first line of pydantic's error messages, which does not contain the reason."""

NO_TOWER: Final = "the engine runs no tower for it"
"""Reason for models that an engine runs without media inputs. They have no embeddings to share."""


class SharingVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine shares a checkpoint's KV, or its embeddings."""

    what: Literal["KV", "embeddings"]
    shared: bool | None
    """Whether the engine shares `what`, or None if only a running engine can determine this."""
    why: str = ""
    """Reason why `what` is not shared, or "" if it is."""
    remedy: str = ""


def asked(what: Literal["KV", "embeddings"], *questions: Callable[[], object]) -> SharingVerdict:
    """Call `questions`, functions that an engine also calls, and return the resulting verdict.

    If a function raises CornplugError, nothing is shared, and the error is the reason.
    """
    try:
        for question in questions:
            question()
    except CornplugError as e:
        return SharingVerdict(what=what, shared=False, why=str(e))
    return SharingVerdict(what=what, shared=True)


def does_not_run(engine: str, error: Exception) -> list[SharingVerdict]:
    """Return the verdicts (nothing is shared) for a checkpoint that the engine rejects with `error`."""
    why = f"{engine} does not run it: {first_line(error)}"
    return [
        SharingVerdict(what="KV", shared=False, why=why),
        SharingVerdict(what="embeddings", shared=False, why=why),
    ]


def first_line(error: Exception) -> str:
    """Return the error's class and the first relevant line of its message.

    Engines append their complete configuration to some messages.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and _COUNTED.match(lines[0]):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def last_line(verdicts: Sequence[SharingVerdict]) -> str:
    """Encode the verdicts as one line of JSON, which `verdicts_of` decodes."""
    return msgspec.json.encode(list(verdicts)).decode()


def verdicts_of(output: str) -> list[SharingVerdict]:
    """Decode the verdicts in the last line of a process's output. Raises msgspec.DecodeError."""
    return last_of(output, list[SharingVerdict])


def last_of(output: str, kind: type[T]) -> T:
    """Decode the last line of a process's output as JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode((output.strip().splitlines() or [""])[-1], type=kind)
