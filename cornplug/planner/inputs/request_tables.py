"""Tables for request classes in a plan's input: their load, lengths and media."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from cornplug.planner.inputs.field_types import (
    Count,
    InputPath,
    InputTable,
    Length,
    Name,
    NonNegative,
    Positive,
    Share,
    field_error,
)
from cornplug.planner.inputs.slo import Job, Slo

_HOURLY_SCHEMA: Final[dict[str, JsonValue]] = {"minItems": 24, "maxItems": 24}


class RequestMedia(InputTable):
    """Media items that an encoder turns into prompt tokens."""

    encoder: Name
    """Component of kind "encoder"."""
    items: Length = 1
    """Media items per request."""
    tokens: Length
    """Prompt tokens per item."""
    hit_rate: Share | None = None
    """Fraction of items with a cached embedding, by default computed from `catalogue` and `zipf`."""
    catalogue: Count | None = None
    """Number of different items from which requests choose. By default, all items are different."""
    zipf: Positive = 0.8
    """Exponent of the Zipf law for the popularity of items."""


class SharedPrefix(InputTable):
    """Tokens at the start of the prompt that other requests share."""

    tokens: Count
    """Length of the prefix."""
    hit_rate: Share | None = None
    """Fraction of requests with a cached prefix, by default computed from `distinct` and `zipf`."""
    distinct: Count = 1
    """Number of different prefixes."""
    zipf: Positive = 0.8
    """Exponent of the Zipf law for the popularity of prefixes."""


class RampGeneration(InputTable):
    """Images or speech generated from the response."""

    generator: Name
    """Component of kind "generator"."""
    units: Length = 1
    """Images or seconds of speech per request."""


class RequestSpec(InputTable):
    """Requests of one kind, which are planned together."""

    name: Name
    """Name of the class, unique in its application."""
    rate: Positive
    """Mean requests per second. A class has either `rate`, `rate_by_hour` or `job`."""
    rate_by_hour: list[NonNegative] | None = Field(default=None, json_schema_extra=_HOURLY_SCHEMA)
    """Mean requests per second in each hour of the day. The plan carries the highest rate."""
    job: Job | None = None
    """Requests with a deadline: `job = { requests = 500000, deadline_hours = 8 }`."""
    peak: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """Planned rate as a multiple of the mean rate."""
    growth_per_minute: NonNegative = 0.0
    """Fraction by which an online rate may grow in a minute. The plan keeps capacity for this growth."""
    burst: Positive = 1.0
    """Squared coefficient of variation of the times between arrivals (Poisson: 1)."""
    prompt: Length = 512
    """Text tokens in the prompt, including the shared prefix."""
    output: Length = 128
    """Tokens in the response."""
    trace: InputPath | None = None
    """File with prompt and output lengths, in place of `prompt` and `output`."""
    trace_format: Literal["azure", "mooncake", "csv"] = "csv"
    """Format of the trace. "csv" has the columns at_s, prompt_tokens, output_tokens."""
    media: list[RequestMedia] = Field(default_factory=list)
    """Images, audio clips or videos in a request."""
    prefix: SharedPrefix | None = None
    """Start of the prompt that other requests share."""
    generates: RampGeneration | None = None
    """Work of a generator after the response."""
    slo: Slo | None = None
    """Latency targets, by default the application's."""
    weight: Positive = 1.0
    """Weight of one request in the goodput."""

    @model_validator(mode="before")
    @classmethod
    def _rate_of_hours(cls, table: Any) -> Any:
        """Set `rate` to the highest rate of all hours. Rates that are not numbers are reported by the
        validation of the field."""
        if not isinstance(table, dict) or table.get("rate_by_hour") is None:
            return table
        hours = table["rate_by_hour"]
        known = isinstance(hours, list) and all(type(rate) in (int, float) for rate in hours)
        if known and len(hours) != _HOURLY_SCHEMA["minItems"]:
            problem = f"{len(hours)} rates for the 24 hours of a day"
            raise field_error("rate_by_hour", problem, "Write 24 rates, starting at midnight.")
        highest = max(hours) if known else 1.0
        if highest == 0:
            raise field_error("rate_by_hour", "the rate of every hour is 0", "Set at least one rate above 0.")
        for other in ("job", "rate"):
            if table.get(other) not in (None, highest):
                raise field_error(
                    other, "rate_by_hour already sets the rate", f"Remove {other} or rate_by_hour."
                )
        return {**table, "rate": highest}

    @model_validator(mode="before")
    @classmethod
    def _rate_of_job(cls, table: Any) -> Any:
        """Set `rate` to the rate of the job. Errors in the job's table are reported by the validation of that
        table."""
        if not isinstance(table, dict) or table.get("job") is None:
            return table
        try:
            rate = Job.model_validate(table["job"]).rate
        except ValidationError:
            rate = 1.0
        if table.get("rate", rate) != rate:
            raise field_error("rate", "the job already sets the rate", "Remove rate.")
        return {**table, "rate": rate}

    @model_validator(mode="after")
    def _check_length_sources(self) -> Self:
        duplicates = sorted({"prompt", "output"} & self.model_fields_set)
        if self.trace is not None and duplicates:
            raise field_error(
                duplicates[0],
                "the trace already sets the lengths",
                f"Remove {' and '.join(duplicates)}, or trace.",
            )
        return self
