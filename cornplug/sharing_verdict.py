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

_PYDANTIC_HEADLINE: Final = re.compile(r"\d+ validation errors? for ")
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


def verdict_of_checks(what: Literal["KV", "embeddings"], *checks: Callable[[], object]) -> SharingVerdict:
    """Call `checks`, functions that an engine also calls, and return the resulting verdict.

    If a function raises CornplugError, nothing is shared, and the error is the reason.
    """
    try:
        for question in checks:
            question()
    except CornplugError as e:
        return SharingVerdict(what=what, shared=False, why=str(e))
    return SharingVerdict(what=what, shared=True)


def rejected_verdicts(engine: str, error: Exception) -> list[SharingVerdict]:
    """Return the verdicts (nothing is shared) for a checkpoint that the engine rejects with `error`."""
    why = f"{engine} does not run it: {summarize_error(error)}"
    return [
        SharingVerdict(what="KV", shared=False, why=why),
        SharingVerdict(what="embeddings", shared=False, why=why),
    ]


def summarize_error(error: Exception) -> str:
    """Return the error's class and the first relevant line of its message.

    Engines append their complete configuration to some messages.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and _PYDANTIC_HEADLINE.match(lines[0]):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def encode_verdicts(verdicts: Sequence[SharingVerdict]) -> str:
    """Encode the verdicts as one line of JSON, which `decode_verdicts` decodes."""
    return msgspec.json.encode(list(verdicts)).decode()


def decode_verdicts(output: str) -> list[SharingVerdict]:
    """Decode the verdicts in the last line of a process's output. Raises msgspec.DecodeError."""
    return decode_last_line(output, list[SharingVerdict])


def decode_last_line(output: str, kind: type[T]) -> T:
    """Decode the last line of a process's output as JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode((output.strip().splitlines() or [""])[-1], type=kind)
