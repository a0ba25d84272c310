"""Tables of measured times. They are CSV files that `cornplug profile` writes, and to which `file` of a
profile refers.

    # machine: 2 cores of ...
    # date: 2026-11-21
    kind,gpu,tp,pp,engine,quantisation,quantity,x,seconds
    prefill,H100,8,1,vllm,none,prompt_tokens,2048,0.252
    kv_tokens,H100,8,1,vllm,none,tokens,89235,

Lines `# key: value` before the header describe the measurement. `quantity` is the unit of `x`, and must be
the unit in `QUANTITIES` for the row's kind. If `engine` is empty, the row is for both engines.

kind       x                                           seconds
prefill    prompt tokens in one iteration              time of the iteration
decode     requests in one iteration, one token each   time of the iteration
kv_token   context tokens in the batch                 time that they add to a decode iteration
overhead   requests                                    time in API, network and tokenizer, off the device
encode     patches in one encoder batch                time of the batch
generate   units of one request                        time of the request
kv_tokens  capacity of the engine's KV cache, tokens   empty
mixed      time of an iteration with both prefill and  empty
           decode, divided by the longer of both times
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cornplug.errors import ConfigError
from cornplug.planner.inputs.schema import MeasuredProfile

COLUMNS: Final = ("kind", "gpu", "tp", "pp", "engine", "quantisation", "quantity", "x", "seconds")
QUANTITIES: Final = {
    "prefill": "prompt_tokens",
    "decode": "requests",
    "kv_token": "context_tokens",
    "overhead": "requests",
    "encode": "patches",
    "generate": "units",
    "kv_tokens": "tokens",
    "mixed": "factor",
}
KINDS_WITHOUT_TIME: Final = frozenset({"kv_tokens", "mixed"})
"""Kinds of rows that have no time. The value of such a row is its x."""
_ALLOWED_VALUES: Final = {
    "kind": tuple(QUANTITIES),
    "engine": ("vllm", "sglang", ""),
    "quantisation": ("none", "fp8", "awq", "gptq"),
}
_CURVE_FIELDS: Final = {
    "prefill": ("prefill_tokens", "prefill_s"),
    "decode": ("decode_requests", "decode_s"),
    "encode": ("encode_patches", "encode_s"),
    "generate": ("units", "unit_s"),
}


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Row of a profile table: one measured point."""

    kind: str
    gpu: str
    x: float
    """Number that was varied, such as prompt tokens. Its unit depends on `kind` (`QUANTITIES`)."""
    seconds: float | None = None
    """Measured time, or None for the kinds in `KINDS_WITHOUT_TIME`."""
    tp: int = 1
    pp: int = 1
    engine: str | None = None
    """Engine that was measured, or None if the row is for both engines."""
    quantisation: str = "none"


@dataclass(frozen=True)
class ProfileTable:
    rows: tuple[ProfileRow, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Description of the measurement, such as its machine and date."""

    def profiles(self) -> list[tuple[str, int, int, str | None, str]]:
        """Return the distinct tuples (gpu, tp, pp, engine, quantisation) of the rows, in order of first
        occurrence."""
        return list(dict.fromkeys((r.gpu, r.tp, r.pp, r.engine, r.quantisation) for r in self.rows))


def write(path: Path, table: ProfileTable) -> None:
    """Write a table to a CSV file. `read` returns an equal table, except that line breaks in the provenance
    become spaces."""
    with path.open("w", encoding="utf-8", newline="") as file:
        for key, value in table.provenance.items():
            file.write(f"# {key}: {' '.join(value.split())}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for r in table.rows:
            seconds = "" if r.seconds is None else repr(r.seconds)
            engine = r.engine or ""
            lines.writerow(
                (
                    r.kind,
                    r.gpu,
                    r.tp,
                    r.pp,
                    engine,
                    r.quantisation,
                    QUANTITIES[r.kind],
                    f"{r.x:.12g}",
                    seconds,
                )
            )


def read(path: Path) -> ProfileTable:
    """Read a table from a CSV file. Raises ConfigError with the file, line and column of an error."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), f"cannot be read: {error}", "Pass a CSV file of `cornplug profile`"
        ) from error
    provenance: dict[str, str] = {}
    rows: list[ProfileRow] = []
    header = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            provenance[key.strip()] = value.strip()
        elif not header:
            _check_header(f"{path}:{number}", line)
            header = True
        else:
            rows.append(_row(f"{path}:{number}", next(csv.reader([line]))))
    if not rows:
        raise ConfigError(str(path), "has no rows", "Create it with `cornplug profile`")
    _check_duplicates(path, rows)
    return ProfileTable(tuple(rows), provenance)


def _check_header(location: str, line: str) -> None:
    found = tuple(cell.strip() for cell in next(csv.reader([line])))
    if found != COLUMNS:
        raise ConfigError(location, f"the header is {','.join(found)}", f"Write {','.join(COLUMNS)}")


def _row(location: str, cells: list[str]) -> ProfileRow:
    if len(cells) != len(COLUMNS):
        raise ConfigError(
            location, f"{len(cells)} columns", f"Write {len(COLUMNS)} columns: {','.join(COLUMNS)}"
        )
    row = dict(zip(COLUMNS, (cell.strip() for cell in cells), strict=True))
    for column, choices in _ALLOWED_VALUES.items():
        if row[column] not in choices:
            remedy = f"Write one of {', '.join(c or repr(c) for c in choices)}"
            raise ConfigError(f"{location} {column}", f"{row[column]!r} is not an allowed value", remedy)
    kind = row["kind"]
    if row["quantity"] != QUANTITIES[kind]:
        raise ConfigError(
            f"{location} quantity",
            f"{row['quantity']!r} is not an allowed value",
            f"Write {QUANTITIES[kind]} in rows of kind {kind}",
        )
    if kind in KINDS_WITHOUT_TIME and row["seconds"]:
        raise ConfigError(
            f"{location} seconds",
            f"rows of kind {kind} have no time",
            "Leave it empty and write the value in x",
        )
    if not row["gpu"]:
        raise ConfigError(
            f"{location} gpu", "is empty", "Write the GPU type as in the input file, such as H100 or cpu-core"
        )
    return ProfileRow(
        kind=kind,
        gpu=row["gpu"],
        x=_number(location, "x", row["x"]),
        seconds=None if kind in KINDS_WITHOUT_TIME else _number(location, "seconds", row["seconds"]),
        tp=_count(location, "tp", row["tp"]),
        pp=_count(location, "pp", row["pp"]),
        engine=row["engine"] or None,
        quantisation=row["quantisation"],
    )


def _number(location: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{location} {column}", f"{text!r} is not a positive number", "Write a number such as 0.252"
        )
    return value


def _count(location: str, column: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{location} {column}", f"{text!r} is not a valid degree", "Write 1, 2, 4 or 8")
    return int(text)


def _check_duplicates(path: Path, rows: Iterable[ProfileRow]) -> None:
    seen: set[tuple[object, ...]] = set()
    for r in rows:
        # A profile has only one value for each of these kinds, so rows that differ in x are also duplicates.
        x = None if r.kind in KINDS_WITHOUT_TIME or r.kind in ("kv_token", "overhead") else r.x
        key = (r.kind, r.gpu, r.tp, r.pp, r.engine, r.quantisation, x)
        if key in seen:
            raise ConfigError(
                str(path), f"{r.kind} of {r.gpu} TP{r.tp} at x = {r.x:g} occurs twice", "Remove one row"
            )
        seen.add(key)


def load_points(profile: MeasuredProfile, engine: str) -> MeasuredProfile:
    """Return the profile with the points of its file. Inline points of a kind are kept if the file has no
    points of this kind.

    Uses the rows with the profile's GPU, TP, PP and quantisation that are for this engine or for both
    engines. Raises ConfigError if the file has no such row.
    """
    if profile.file is None:
        return profile
    table = read(profile.file)
    rows = [r for r in table.rows if _fits(r, profile, engine)]
    if not rows:
        have = "; ".join(f"{g} TP{t} PP{p} {e or 'any engine'} {q}" for g, t, p, e, q in table.profiles())
        wanted = f"{profile.gpu} TP{profile.tp} PP{profile.pp} {engine} {profile.quantisation}"
        raise ConfigError(str(profile.file), f"has no rows for {wanted}", f"It has: {have}")
    source = profile.source
    if table.provenance:
        source += ": " + ", ".join(f"{k} {v}" for k, v in table.provenance.items())
    return profile.model_copy(update={**_points(rows), "source": source})


def _fits(row: ProfileRow, profile: MeasuredProfile, engine: str) -> bool:
    same = (row.gpu, row.tp, row.pp, row.quantisation)
    return same == (profile.gpu, profile.tp, profile.pp, profile.quantisation) and row.engine in (
        None,
        engine,
    )


def _points(rows: Iterable[ProfileRow]) -> dict[str, Any]:
    """Return the fields of `MeasuredProfile` that these rows set. Rows for one engine override rows for both
    engines."""
    of: dict[str, dict[float, ProfileRow]] = {}
    for r in sorted(rows, key=lambda r: (r.kind, r.engine is not None, r.x)):
        of.setdefault(r.kind, {})[r.x] = r
    fields: dict[str, Any] = {}
    for kind, (x_field, s_field) in _CURVE_FIELDS.items():
        points = sorted(of.get(kind, {}).values(), key=lambda r: r.x)
        if points:
            whole = kind != "generate"
            fields[x_field] = [int(r.x) if whole else r.x for r in points]
            fields[s_field] = [r.seconds for r in points]
    for kind, name in (("kv_token", "kv_token_s"), ("overhead", "request_overhead_s")):
        for r in of.get(kind, {}).values():
            fields[name] = (r.seconds or 0.0) / r.x
    for r in of.get("kv_tokens", {}).values():
        fields["kv_tokens"] = int(r.x)
    for r in of.get("mixed", {}).values():
        fields["mixed_factor"] = r.x
    return fields
