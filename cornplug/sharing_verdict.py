"""Verdicts on sharing a checkpoint, as data: an engine's process says them, the doctor prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from cornplug.errors import CornplugError

T = TypeVar("T")

_COUNTED: Final = re.compile(r"\d+ validation errors? for ")
"""The head of pydantic's message."""

NO_TOWER: Final = "the engine runs no tower for it"
"""The reason of a text model, and of one that runs as text: there are no embeddings to share."""


class SharingVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether KV, or embeddings, of one checkpoint are shared."""

    what: Literal["KV", "embeddings"]
    shared: bool | None
    """None where only an engine that runs shows it."""
    why: str = ""
    """The reason; "" where it is shared."""
    remedy: str = ""


def asked(what: Literal["KV", "embeddings"], *questions: Callable[[], object]) -> SharingVerdict:
    """The verdict of an engine's own functions: the first that raises CornplugError gives the reason."""
    try:
        for question in questions:
            question()
    except CornplugError as e:
        return SharingVerdict(what=what, shared=False, why=str(e))
    return SharingVerdict(what=what, shared=True)


def does_not_run(engine: str, error: Exception) -> list[SharingVerdict]:
    """The verdicts on a checkpoint that the engine itself refuses with this error."""
    why = f"{engine} does not run it: {first_line(error)}"
    return [
        SharingVerdict(what="KV", shared=False, why=why),
        SharingVerdict(what="embeddings", shared=False, why=why),
    ]


def first_line(error: Exception) -> str:
    """The error's class and the first line that says something: engines append their whole configuration."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and _COUNTED.match(lines[0]):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def last_line(verdicts: Sequence[SharingVerdict]) -> str:
    """The verdicts as one line of JSON, which `verdicts_of` reads."""
    return msgspec.json.encode(list(verdicts)).decode()


def verdicts_of(output: str) -> list[SharingVerdict]:
    """The verdicts in the last line of a process's output. Raises msgspec.DecodeError for any other line."""
    return last_of(output, list[SharingVerdict])


def last_of(output: str, kind: type[T]) -> T:
    """The last line of a process's output, read as JSON. Raises msgspec.DecodeError for any other line."""
    return msgspec.json.decode((output.strip().splitlines() or [""])[-1], type=kind)
