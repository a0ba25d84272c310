"""Types of fields in a plan's input (numbers, names, lengths, paths), and errors with a field's location."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cornplug.errors import ConfigError
from cornplug.settings import GIB, parse_byte_size


def field_error(key: str, problem: str, remedy: str) -> PydanticCustomError:
    """Create a validation error. `key` is the invalid key of the validated table, or "" if the complete table
    or value is invalid."""
    return PydanticCustomError(
        "plan_input", "{key}: {problem}. {remedy}", {"key": key, "problem": problem, "remedy": remedy}
    )


def _gib(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_byte_size(value) / GIB
    except ValueError as e:
        problem, _, remedy = str(e).partition(": ")
        raise field_error("", problem, f"{remedy[:1].upper()}{remedy[1:]}.") from None


Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
_SizeText = Annotated[
    str,
    Field(pattern=r"^\s*[0-9.]+\s*([KMGTkmgt]?[iI]?[bB])?\s*$", json_schema_extra={"format": "size"}),
]
Gib = Annotated[NonNegative, BeforeValidator(_gib, json_schema_input_type=NonNegative | _SizeText)]
PositiveGib = Annotated[Positive, BeforeValidator(_gib, json_schema_input_type=Positive | _SizeText)]
"""Number of GiB, or text with a unit, such as 64, "64GiB" or "512 MiB"."""
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

Kind = Literal["encoder", "llm", "generator"]
Engine = Literal["vllm", "sglang"]
GeneratorServer = Literal["vllm-omni"]
Workload = Literal["online", "semi-online", "offline"]
Quantisation = Literal["none", "fp8", "awq", "gptq"]
RouterPolicy = Literal["power_of_two", "random"]


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    """Resolve a path relative to the folder of the input file, which `toml_reader.py` passes as context.
    Without this context, return the path unchanged."""
    folder: Path | None = (info.context or {}).get("folder")
    return path if folder is None else folder / path


def _resolve_model(model: str, info: ValidationInfo) -> str:
    return str(_resolve_path(Path(model), info)) if model.startswith(("./", "../")) else model


InputPath = Annotated[Path, AfterValidator(_resolve_path)]
Model = Annotated[str, AfterValidator(_resolve_model)]
"""Hub id or folder. A path that starts with ./ or ../ is relative to the file that contains it."""
_HOST_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]")
"""Host name, IPv4 address, or IPv6 address in brackets, as in URLs."""
_WILDCARD_ADDRESS: Final = re.compile(r"[0.]+|\[[0:.]*\]")


def is_single_host(host: str) -> bool:
    """Return whether `host` is the address of a single host, and not a wildcard such as 0.0.0.0."""
    return _HOST_PATTERN.fullmatch(host) is not None and _WILDCARD_ADDRESS.fullmatch(host) is None


def _check_host(host: str) -> str:
    if not is_single_host(host):
        raise field_error(
            "", f"{host!r} is not the address of one host", "Write a host name or IPv4 address."
        )
    return host


def _listen_host(host: str) -> str:
    return host if host == "0.0.0.0" else _check_host(host)  # noqa: S104


Host = Annotated[str, AfterValidator(_check_host)]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
"""Address to listen on: the address of a host, or 0.0.0.0 for all addresses."""


class InputTable(BaseModel):
    """Base class of the tables in the input file. The docstring under a field is the field's description in
    the JSON schema and in docs/plan-input.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LogNormal(InputTable):
    """Log-normal length. Samples above the maximum are drawn again."""

    mean: Positive
    """Mean of the distribution before values above `max` are removed."""
    cv: NonNegative = 1.0
    """Standard deviation / mean."""
    max: Count = 1_000_000
    """Largest length."""

    @model_validator(mode="after")
    def _max_above_mean(self) -> Self:
        if self.max < self.mean:
            raise field_error(
                "max", f"{self.max} is below the mean, {self.mean:g}", "Increase it, or omit it."
            )
        return self


class Histogram(InputTable):
    """Lengths with their weights."""

    values: list[Count] = Field(min_length=1)
    """Lengths that occur."""
    weights: list[NonNegative] = Field(min_length=1)
    """Weight of each length."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if len(self.values) != len(self.weights) or sum(self.weights) <= 0:
            raise field_error(
                "weights",
                f"{len(self.weights)} weights for {len(self.values)} values, or all weights are zero",
                "Write one weight for each value, with at least one above zero.",
            )
        return self


def _length_kind(value: Any) -> str:
    """Return the form in which a length is written, so that only errors for this form are reported."""
    if isinstance(value, Histogram) or (isinstance(value, dict) and {"values", "weights"} & value.keys()):
        return "histogram"
    return "log-normal" if isinstance(value, (dict, LogNormal)) else "number"


Length = Annotated[
    Annotated[int, Field(ge=0, strict=True), Tag("number")]
    | Annotated[LogNormal, Tag("log-normal")]
    | Annotated[Histogram, Tag("histogram")],
    Discriminator(_length_kind),
]
Location = tuple[str | int, ...]
"""Location of a field: keys and list indices from the top of the input, such as ("applications", 0,
"llm")."""
BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
"""TOML key that needs no quotation marks."""


class InputError(ConfigError):
    """Error for an invalid field of the input. `field` is text such as "applications[0].llm"."""

    def __init__(self, location: Location, problem: str, remedy: str) -> None:
        super().__init__(field_path(location), problem, remedy)
        self.location = location
        self.problem = problem


def field_path(location: Location) -> str:
    """Format a location as TOML's dotted keys, with list indices in brackets."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if BARE_KEY.fullmatch(part) else f'"{part}"')
    return text or "the file"


def suggest_known_name(name: str, known: Sequence[str]) -> str:
    """Return a remedy for an unknown name: the known name that is most similar, if any, and all known
    names."""
    close = get_close_matches(name, known, 1, 0.6)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Known: {', '.join(known) or 'none'}."
