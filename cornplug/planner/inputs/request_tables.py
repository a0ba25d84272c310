"""Request classes as a plan's input writes them: their load, lengths and media."""

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
    wrong,
)
from cornplug.planner.inputs.slo import Job, Slo

_HOURS: Final[dict[str, JsonValue]] = {"minItems": 24, "maxItems": 24}


class RequestMedia(InputTable):
    """Items that an encoder turns into tokens of the prompt."""

    encoder: Name
    """A component of kind "encoder"."""
    items: Length = 1
    """Media of one request."""
    tokens: Length
    """Tokens an item adds to the prompt."""
    hit_rate: Share | None = None
    """Of items whose embedding is in the cache, where it is known; else from the next two."""
    catalogue: Count | None = None
    """Different items that come again, drawn by a Zipf law."""
    zipf: Positive = 0.8
    """Exponent of that law: the larger, the more requests are for the same few items."""


class SharedPrefix(InputTable):
    """Tokens at the head of a prompt that other requests begin with, too."""

    tokens: Count
    """Length of the shared part."""
    hit_rate: Share | None = None
    """Of requests whose prefix is in a cache, where it is known; else from the next two."""
    distinct: Count = 1
    """Different prefixes, drawn by a Zipf law."""
    zipf: Positive = 0.8
    """Exponent of that law."""


class RampGeneration(InputTable):
    """Images or speech made from the answer."""

    generator: Name
    """A component of kind "generator"."""
    units: Length = 1
    """Units of one request: images, seconds of speech."""


class RequestSpec(InputTable):
    """Requests of one kind: a request class is planned for as a whole."""

    name: Name
    """Unique in its application."""
    rate: Positive
    """Requests a second, on average. A class has this, `rate_by_hour` or `job`."""
    rate_by_hour: list[NonNegative] | None = Field(default=None, json_schema_extra=_HOURS)
    """Requests a second on average in each hour of a day, from midnight, all classes by one clock. The plan
    carries the highest, and says which of its machines each hour needs."""
    job: Job | None = None
    """So many requests by a deadline: `job = { requests = 500000, deadline_hours = 8 }`. The report says when
    it is done, and for how many dollars."""
    peak: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """The plan is made for rate x peak."""
    growth_per_minute: NonNegative = 0.0
    """Share by which its rate may grow within a minute. Until further replicas have read their weights and
    started, those that run must carry it; with 0, no reserve is kept for that. Online only."""
    burst: Positive = 1.0
    """Squared coefficient of variation of the times between arrivals; 1: Poisson."""
    prompt: Length = 512
    """Text tokens, the shared prefix among them."""
    output: Length = 128
    """Tokens of the answer."""
    trace: InputPath | None = None
    """File of prompt and output lengths together, in place of `prompt` and `output`."""
    trace_format: Literal["azure", "mooncake", "csv"] = "csv"
    """Azure's CSV, Mooncake's JSON lines, or a CSV of at_s, prompt_tokens, output_tokens."""
    media: list[RequestMedia] = Field(default_factory=list)
    """Images, audio or video of a request."""
    prefix: SharedPrefix | None = None
    """Head of the prompt that other requests have, too."""
    generates: RampGeneration | None = None
    """Work of a generator after the answer."""
    slo: Slo | None = None
    """Left out: the application's."""
    weight: Positive = 1.0
    """Of one request in the goodput."""

    @model_validator(mode="before")
    @classmethod
    def _rate_of_hours(cls, table: Any) -> Any:
        """The table with its highest hour's rate; hours that are no numbers are told of by their field."""
        if not isinstance(table, dict) or table.get("rate_by_hour") is None:
            return table
        hours = table["rate_by_hour"]
        known = isinstance(hours, list) and all(type(rate) in (int, float) for rate in hours)
        if known and len(hours) != _HOURS["minItems"]:
            problem = f"{len(hours)} rates for the 24 hours of a day"
            raise wrong("rate_by_hour", problem, "Write 24 of them, from midnight on.")
        highest = max(hours) if known else 1.0
        if highest == 0:
            raise wrong("rate_by_hour", "no hour has a request", "Write the rate of one at least.")
        for other in ("job", "rate"):
            if table.get(other) not in (None, highest):
                raise wrong(other, "rate_by_hour says the rates", f"Leave out {other}, or rate_by_hour.")
        return {**table, "rate": highest}

    @model_validator(mode="before")
    @classmethod
    def _rate_of_job(cls, table: Any) -> Any:
        """The table with the job's rate; a wrong job is told of by its own table."""
        if not isinstance(table, dict) or table.get("job") is None:
            return table
        try:
            rate = Job.model_validate(table["job"]).rate
        except ValidationError:
            rate = 1.0
        if table.get("rate", rate) != rate:
            raise wrong("rate", "the job says how many requests there are, and by when", "Leave out rate.")
        return {**table, "rate": rate}

    @model_validator(mode="after")
    def _lengths_from_one_place(self) -> Self:
        duplicates = sorted({"prompt", "output"} & self.model_fields_set)
        if self.trace is not None and duplicates:
            raise wrong(
                duplicates[0],
                "the trace gives lengths, too",
                f"Leave out {' and '.join(duplicates)}, or trace.",
            )
        return self
