"""Reader for a plan's TOML file, which reports all errors together, each with its line and a remedy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.inputs import cross_checks, toml_messages
from cornplug.planner.inputs.input_error import InputError, field
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.inputs.toml_positions import line_of, lines_of

_WHERE: Final = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


File = TypeVar("File", bound=PlanInput)


def read(path: Path) -> PlanInput:
    """Read the TOML file of a plan. Raises ConfigError as `read_as` does."""
    return read_as(PlanInput, path, cross_checks.errors)


def read_as(table: type[File], path: Path, checks: Callable[[File], Iterable[InputError]]) -> File:
    """Read a TOML file as an instance of `table`. Paths in the file are relative to its folder.

    Raises ConfigError. Its text has a line for each error in the order of the file, such as "plan.toml:17
    applications[0].llm: problem. Remedy", and its `field` is that of the first error. `checks` yields further
    errors, and is called only if every table is valid.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise _syntax_error(path, text, e) from e
    try:
        plan_input = table.model_validate(data, context={"folder": path.parent})
    except ValidationError as e:
        raise _joined(path, text, toml_messages.problems(e, data)) from e
    if errors := list(checks(plan_input)):
        raise _joined(path, text, errors)
    return plan_input


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except OSError as e:
        raise ConfigError(
            str(path), f"cannot be read: {e.strerror}", "Pass the path of a plan's TOML file."
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), "not UTF-8 text", "Pass the path of a plan's TOML file.") from e


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    found = _WHERE.search(str(error))
    line = int(found[1]) if found and found[1] else text.count("\n") + 1
    problem = _WHERE.sub("", str(error))
    content = text.splitlines()[line - 1].strip() if line <= text.count("\n") + 1 and text else ""
    remedy = "Use TOML syntax: key = value, strings in quotes, and headers such as [rules] or [[components]]."
    return ConfigError(f"{path}:{line}", f"{problem}: {content}" if content else problem, remedy)


def _joined(path: Path, text: str, errors: Iterable[InputError]) -> ConfigError:
    lines = lines_of(text)
    placed = sorted(((line_of(lines, e.place), e) for e in errors), key=lambda pair: pair[0])
    (line, first), *others = placed
    more = [f"{path}:{at} {e}" for at, e in others]
    return ConfigError(f"{path}:{line} {field(first.place)}", first.problem, "\n".join([first.remedy, *more]))
