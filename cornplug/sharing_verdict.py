"""Verdicts on whether a checkpoint is shared. An engine's process produces them, and the doctor prints
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from cornplug.errors import CornplugError

T = TypeVar("T")

_COUNTED: Final = re.compile(r"\d+ validation errors? for ")
"""Start of pydantic's message."""

NO_TOWER: Final = "the engine runs no tower for it"
"""Reason for models that run without media inputs, which have no embeddings to share."""


class SharingVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether KV, or embeddings, of one checkpoint are shared."""

    what: Literal["KV", "embeddings"]
    shared: bool | None
    """None if this can only be determined by a running engine."""
    why: str = ""
    """Reason, or "" if it is shared."""
    remedy: str = ""


def asked(what: Literal["KV", "embeddings"], *questions: Callable[[], object]) -> SharingVerdict:
    """Return the verdict of an engine's functions. The first CornplugError that they raise is the reason."""
    try:
        for question in questions:
            question()
    except CornplugError as e:
        return SharingVerdict(what=what, shared=False, why=str(e))
    return SharingVerdict(what=what, shared=True)


def does_not_run(engine: str, error: Exception) -> list[SharingVerdict]:
    """Return the verdicts for a checkpoint that the engine rejects with this error."""
    why = f"{engine} does not run it: {first_line(error)}"
    return [
        SharingVerdict(what="KV", shared=False, why=why),
        SharingVerdict(what="embeddings", shared=False, why=why),
    ]


def first_line(error: Exception) -> str:
    """Return the error's class and first relevant line, because engines append their whole configuration."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and _COUNTED.match(lines[0]):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def last_line(verdicts: Sequence[SharingVerdict]) -> str:
    """Encode the verdicts as one line of JSON for `verdicts_of`."""
    return msgspec.json.encode(list(verdicts)).decode()


def verdicts_of(output: str) -> list[SharingVerdict]:
    """Decode the verdicts in the last line of a process's output. Raises msgspec.DecodeError."""
    return last_of(output, list[SharingVerdict])


def last_of(output: str, kind: type[T]) -> T:
    """Decode the last line of a process's output as JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode((output.strip().splitlines() or [""])[-1], type=kind)
