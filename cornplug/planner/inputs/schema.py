"""Schema of the planner's input: the tables and fields of a plan's TOML file.

Only shapes and ranges are checked here, and the fields of one table against each other; checks across
tables are in `cross_checks.py`. Reading the file, and finding the line of an error, is
`toml_reader.py`; the meaning of a length is `length_distributions.py`.
Times are seconds, rates requests per second, memory GiB (2**30) unless a name says otherwise. A docstring
under a field is its description in `cornplug plan schema` and in docs/plan-input.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cornplug.planner.inputs.components import (
    Component,
    MeasuredProfile,
    Profile,
    RooflineProfile,
    ThroughputProfile,
)
from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    Flag,
    Histogram,
    InputPath,
    InputTable,
    Kind,
    Length,
    LogNormal,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    RouterPolicy,
    Share,
    Whole,
    Workload,
    wrong,
)
from cornplug.planner.inputs.gpu_catalog import GpuSpec, NodeClass
from cornplug.planner.inputs.shape_tables import GeneratorShape, LLMShape, TowerShape
from cornplug.planner.inputs.slo import Job, PercentileBounds, Slo

Structure = Literal["monolith", "E+PD", "P+D", "E+P+D", "+G"]

__all__ = [
    "Application",
    "CacheOptions",
    "ChangeRules",
    "Component",
    "Count",
    "Engine",
    "GeneratorShape",
    "GpuSpec",
    "Histogram",
    "InputTable",
    "Kind",
    "LLMShape",
    "Length",
    "LogNormal",
    "MeasuredProfile",
    "Name",
    "NodeClass",
    "NonNegative",
    "PercentileBounds",
    "PlanInput",
    "PlanRules",
    "Positive",
    "Profile",
    "Quantisation",
    "RampGeneration",
    "RequestMedia",
    "RequestSpec",
    "RooflineProfile",
    "RouterPolicy",
    "Share",
    "SharedPrefix",
    "Slo",
    "SolverOptions",
    "Structure",
    "ThroughputProfile",
    "TowerShape",
    "Workload",
]

# Applications -------------------------------------------------------------------------------


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
    """Requests a second, on average. A class has this or `job`."""
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


class Application(InputTable):
    """Requests to one LLM, with their SLO."""

    name: Name
    """Name in this file."""
    llm: Name
    """A component of kind "llm"."""
    workload: Workload = "online"
    """Online work keeps its SLO first; semi-online work can wait seconds, offline work hours."""
    qos: Name = "default"
    """Class of service, as the encoder service and admission know it."""
    slo: Slo = Slo()
    """Of all its requests that have none themselves."""
    structures: list[Structure] | None = None
    """Structures that a plan may use for it. Left out: all. E, P, D: encode, prefill, decode on separate
    engines; "+G": generator apart from the LLM."""
    requests: list[RequestSpec] = Field(min_length=1)
    """Its request classes."""


# The rest -----------------------------------------------------------------------------------


class CacheOptions(InputTable):
    """Sizes among which the plan chooses, GiB of a node's DRAM in the store; 0: none."""

    embedding_gib: list[NonNegative] = Field(default=[0.0])
    """Sizes of the cache of encoder outputs."""
    prefix_gib: list[NonNegative] = Field(default=[0.0])
    """Sizes of the cache of prompts' KV."""


class PlanRules(InputTable):
    """What the plan optimises, and the room that it leaves."""

    objective: Literal["cost", "goodput", "max-min"] = "cost"
    """Least dollars for all requests; most weighted requests a second; or the largest part of every class."""
    max_utilisation: Share = 0.95
    """Share of a cell's capacity that all work together may fill."""
    online_share: Share = 0.8
    """Share of a cell's capacity that online work may fill; the rest is for work that can wait."""
    n_plus_one: Flag | Literal["node"] = True
    """An online application survives the loss of one replica of each of its services; "node": of any one
    node, with all replicas on it."""
    spot_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """Share of each online request class's work that spot machines may do: so much of it may stop at once."""
    start_s: NonNegative = 60.0
    """Seconds in which a replica starts, beside those for reading its weights, for `growth_per_minute` of
    requests."""
    use_idle_gpus: Flag = True
    """Further replicas fill GPUs of rented nodes that would be idle; false: they stay free for other work."""
    network_utilisation: Share = 0.7
    """Share of the nodes' network cards that planned traffic may fill."""
    router: RouterPolicy = "power_of_two"
    """Of vllm-router and sglang-router; neither knows the work of a request."""
    split: Literal["fractional", "slices"] = "fractional"
    """How a request class is divided among cells: at will, or in equal slices."""
    slices: Count = 1
    """With split = "slices": a request type's rate is served in multiples of rate / slices."""
    colocate: Flag = True
    """Parts of GPUs may be planned for."""
    disaggregation_efficiency_p: Share = 0.9
    """Of a prefill engine's throughput, what a P+D pair reaches (AIConfigurator's constant)."""
    disaggregation_efficiency_d: Share = 0.92
    """Of a decode engine's throughput, what a P+D pair reaches (AIConfigurator's constant)."""
    interference: Share = 0.1
    """Speed that a replica loses to its neighbours on the same GPU."""
    simulate: Flag = True
    """Capacities and the whole plan are confirmed by simulation; false: closed forms only."""
    seed: Whole = 0
    """Of sampled request lengths and of the simulation."""


class SolverOptions(InputTable):
    """When the search for a plan ends."""

    gap: NonNegative = 0.01
    """The search ends when no plan can be better by more than this share of the objective."""
    work: Positive = 20.0
    """Million solver steps x non-zero coefficients at which a solve ends; a core does 0.3 to 2.5 a second.
    A step is a point at which HiGHS checks its limits. Their number depends on the input alone, and so does
    the plan."""
    time_limit_s: Positive = 600.0
    """Seconds after which a solve ends before its work is done. The plan then depends on the machine, and
    says so."""
    threads: Count = 1
    """Of HiGHS, the solver. From 1.16 on it searches otherwise with several: a search that `work` ends may
    then find another plan, and always the same one with the same number."""


class ChangeRules(InputTable):
    """The current deployment, and the cost that a change of it may have."""

    plan: InputPath
    """plan.json of the running deployment."""
    horizon_hours: Positive = 24.0
    """Hours over which the cost of a change is spread."""
    max_changes: Whole | None = None
    """Most starts and role switches. Left out: any number."""
    min_dwell_s: NonNegative = 900.0
    """Seconds that a replica runs at least before it is stopped."""
    start_s: NonNegative = 300.0
    """From a command to a serving replica: loading, graphs, warm-up."""
    role_switch: Flag = False
    """SGLang's P and D replicas run with a transfer backend that can change their role (mooncake)."""
    role_switch_s: NonNegative = 30.0
    """Seconds of a role switch, in which the replica serves nothing."""
    gain: Annotated[float, Field(ge=1, strict=True)] = 1.2
    """A new plan is worth it when it saves this times its switching cost."""


class PlanInput(InputTable):
    """Input of `cornplug plan`."""

    name: Name = "plan"
    """Of the plan."""
    components: list[Component] = Field(min_length=1)
    """Models and their parts."""
    applications: list[Application] = Field(min_length=1)
    """Applications with their load and SLOs."""
    pool: list[NodeClass] = Field(min_length=1)
    """Machines that can be had."""
    gpus: list[GpuSpec] = Field(default_factory=list)
    """Device types beside those of cornplug's table, or in their place."""
    prices: InputPath | None = None
    """A price table in place of cornplug's own, in the same format."""
    caches: CacheOptions = CacheOptions()
    """Caches among whose sizes the plan chooses."""
    rules: PlanRules = PlanRules()
    """Objective, room for peaks and losses, router."""
    solver: SolverOptions = SolverOptions()
    """Limits of the search."""
    change: ChangeRules | None = None
    """The running deployment, for re-planning."""

    @property
    def component(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}
