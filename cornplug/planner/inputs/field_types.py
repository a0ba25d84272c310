"""Field types of the tables of a plan's input: numbers, names, lengths, paths, and errors."""

from __future__ import annotations

import re
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

from cornplug.settings.byte_size import bytes_of


def wrong(key: str, problem: str, remedy: str) -> PydanticCustomError:
    """An error of a validator. `key` is the one within its table; "" for the table itself."""
    return PydanticCustomError(
        "plan_input", "{key}: {problem}. {remedy}", {"key": key, "problem": problem, "remedy": remedy}
    )


def _gib(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return bytes_of(value) / 2**30
    except ValueError as e:
        problem, _, remedy = str(e).partition(": ")
        raise wrong("", problem, f"{remedy[:1].upper()}{remedy[1:]}.") from None


Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
_SizeText = Annotated[
    str,
    Field(pattern=r"^\s*[0-9.]+\s*([KMGTkmgt]?[iI]?[bB])?\s*$", json_schema_extra={"format": "size"}),
]
Gib = Annotated[NonNegative, BeforeValidator(_gib, json_schema_input_type=NonNegative | _SizeText)]
PositiveGib = Annotated[Positive, BeforeValidator(_gib, json_schema_input_type=Positive | _SizeText)]
"""A number of GiB, or a text with a unit: 64, "64GiB", "512 MiB"."""
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

Kind = Literal["encoder", "llm", "generator"]
Engine = Literal["vllm", "sglang"]
GeneratorServer = Literal["vllm-omni"]
Workload = Literal["online", "semi-online", "offline"]
Quantisation = Literal["none", "fp8", "awq", "gptq"]
RouterPolicy = Literal["power_of_two", "random"]


def _from_its_file(path: Path, info: ValidationInfo) -> Path:
    """Relative to the file that names it, where `toml_reader.py` says which that is."""
    folder: Path | None = (info.context or {}).get("folder")
    return path if folder is None else folder / path


def _model_from_its_file(model: str, info: ValidationInfo) -> str:
    return str(_from_its_file(Path(model), info)) if model.startswith(("./", "../")) else model


InputPath = Annotated[Path, AfterValidator(_from_its_file)]
Model = Annotated[str, AfterValidator(_model_from_its_file)]
"""A hub id, or a folder: ./NAME is beside the file that says it."""


_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]")
"""A host's name, IPv4 address, or IPv6 address in brackets, as URLs have it."""
_EVERY_ADDRESS: Final = re.compile(r"[0.]+|\[[0:.]*\]")


def names_one_host(host: str) -> bool:
    """Whether a text is an address to connect to, and not one to listen at every address."""
    return _HOST.fullmatch(host) is not None and _EVERY_ADDRESS.fullmatch(host) is None


def _one_host(host: str) -> str:
    if not names_one_host(host):
        raise wrong("", f"{host!r} is no address of one host", "Write its name or its IPv4 address.")
    return host


def _listen_host(host: str) -> str:
    return host if host == "0.0.0.0" else _one_host(host)  # noqa: S104


Host = Annotated[str, AfterValidator(_one_host)]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
"""A host's own address, or 0.0.0.0."""


class InputTable(BaseModel):
    """A table of the file. The docstring under a field is its description in the JSON schema and in
    docs/plan-input.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LogNormal(InputTable):
    """A log-normal length, cut off at `max` (drawn again beyond it)."""

    mean: Positive
    """Of the log-normal before the cut-off."""
    cv: NonNegative = 1.0
    """Standard deviation / mean."""
    max: Count = 1_000_000
    """Largest length."""

    @model_validator(mode="after")
    def _max_above_mean(self) -> Self:
        if self.max < self.mean:
            raise wrong("max", f"{self.max} is below the mean, {self.mean:g}", "Raise it, or leave it out.")
        return self


class Histogram(InputTable):
    """Lengths with their weights."""

    values: list[Count] = Field(min_length=1)
    """Lengths that occur."""
    weights: list[NonNegative] = Field(min_length=1)
    """Of each value; they need not sum to 1."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if len(self.values) != len(self.weights) or sum(self.weights) <= 0:
            raise wrong(
                "weights",
                f"{len(self.weights)} for {len(self.values)} values, or all zero",
                "Write one for each of values, and not all zero.",
            )
        return self


def _length_kind(value: Any) -> str:
    """Which one is meant, so that an error is told of that one only."""
    if isinstance(value, Histogram) or (isinstance(value, dict) and {"values", "weights"} & value.keys()):
        return "histogram"
    return "log-normal" if isinstance(value, (dict, LogNormal)) else "number"


Length = Annotated[
    Annotated[int, Field(ge=0, strict=True), Tag("number")]
    | Annotated[LogNormal, Tag("log-normal")]
    | Annotated[Histogram, Tag("histogram")],
    Discriminator(_length_kind),
]
