"""Traces of recorded requests, with arrival times and numbers of prompt and output tokens.

The formats are "azure" (Azure LLM inference traces 2023 and 2024, CSV), "mooncake" (Mooncake's FAST'25
traces, JSON lines), and "csv" (cornplug's own format with the columns at_s, prompt_tokens and output_tokens).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError

Format = Literal["azure", "mooncake", "csv"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Recorded requests. Each array has an entry for each request, in order of arrival."""

    at_s: NDArray[np.float64]
    """Seconds since the first request."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


@dataclass(frozen=True)
class _Layout:
    columns: tuple[str, str, str]
    """Names of the columns with the arrival time, the prompt tokens and the output tokens."""
    seconds: Callable[[Any], float]
    """Converts an arrival time in the file to seconds."""


def _azure_seconds(text: str) -> float:
    return datetime.fromisoformat(text.strip()).timestamp()


_LAYOUTS: Final[Mapping[Format, _Layout]] = {
    "azure": _Layout(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_seconds),
    "mooncake": _Layout(("timestamp", "input_length", "output_length"), lambda ms: float(ms) / 1000),
    "csv": _Layout(("at_s", "prompt_tokens", "output_tokens"), float),
}

_OBJECTS: Final = "Mooncake traces contain one JSON object per line."


def read(path: Path, format: Format) -> RequestTrace:
    """Read the trace in a file. The result is cached until the file changes.

    Raises ConfigError with the file, line and column of an error.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise ConfigError(str(path), f"cannot read the trace: {e.strerror}", "Correct the path.") from e
    return _read(path, format, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _read(path: Path, format: Format, _changed_ns: int, _size: int) -> RequestTrace:
    layout = _LAYOUTS[format]
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            rows = list(_json_rows(f, path) if format == "mooncake" else _csv_rows(f, path, layout))
    except UnicodeDecodeError as e:
        raise ConfigError(
            str(path), "the trace is not a text file", "Decompress it if it is compressed."
        ) from e
    if not rows:
        raise ConfigError(str(path), "the trace has no requests", "Use a file with at least one request.")
    at, prompt, output = zip(*(_numbers(path, line, row, layout) for line, row in rows), strict=True)
    at_s = np.asarray(at)
    order = np.argsort(at_s, kind="stable")
    return RequestTrace(
        at_s[order] - at_s.min(), np.asarray(prompt, np.int64)[order], np.asarray(output, np.int64)[order]
    )


def _csv_rows(file: Iterator[str], path: Path, layout: _Layout) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    lacking = [name for name in layout.columns if name not in (reader.fieldnames or ())]
    if lacking:
        raise ConfigError(
            f"{path}:1",
            f"no column {', '.join(lacking)}; the first line has {', '.join(reader.fieldnames or ())}",
            f"Make the first line {','.join(layout.columns)}, or set another trace_format.",
        )
    for row in reader:
        yield reader.line_num, row


def _json_rows(file: Iterator[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{path}:{line}", f"invalid JSON: {e.msg}", _OBJECTS) from e
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{line}", "not a JSON object", _OBJECTS)
        yield line, row


def _numbers(path: Path, line: int, row: Mapping[str, Any], layout: _Layout) -> tuple[float, int, int]:
    at, prompt, output = layout.columns
    return (
        _cell(path, line, row, at, layout.seconds, "a time"),
        _cell(path, line, row, prompt, _tokens, "a number of tokens"),
        # A request without output tokens counts as one token, because engines generate at least one.
        max(_cell(path, line, row, output, _tokens, "a number of tokens"), 1),
    )


def _tokens(value: Any) -> int:
    tokens = int(value)
    if tokens < 0:
        raise ValueError(value)
    return tokens


def _cell(
    path: Path, line: int, row: Mapping[str, Any], column: str, parse: Callable[[Any], T], what: str
) -> T:
    try:
        return parse(row[column])
    except KeyError as e:
        raise ConfigError(f"{path}:{line} {column}", "missing", f"Write {what} in every line.") from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{path}:{line} {column}", f"{row[column]!r} is not {what}", "Correct it.") from e
