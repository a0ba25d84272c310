"""Schema of the planner's input: the tables and fields of a plan's TOML file.

Only shapes and ranges are checked here, and the fields of one table against each other; checks across
tables are in `cross_checks.py`. Reading the file, and finding the line of an error, is
`toml_reader.py`; the meaning of a length is `length_distributions.py`.
Times are seconds, rates requests per second, memory GiB (2**30) unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cornplug.planner.inputs.components import (
    Component,
    GeneratorShape,
    LLMShape,
    MeasuredProfile,
    Profile,
    RooflineProfile,
    ThroughputProfile,
    TowerShape,
)
from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
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
    Workload,
    wrong,
)

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


class Slo(InputTable):
    """Bounds on one percentile of the requests' times; None: no bound."""

    percentile: Literal["mean", "p50", "p95", "p99"] = "p95"
    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None


class RequestMedia(InputTable):
    """Items that an encoder turns into tokens of the prompt."""

    encoder: Name
    items: Length = 1
    tokens: Length
    """Tokens an item adds to the prompt."""
    hit_rate: Share | None = None
    """Of items whose embedding is in the cache, where it is known; else from the next two."""
    catalogue: Count | None = None
    """Different items that come again, drawn by a Zipf law."""
    zipf: Positive = 0.8


class SharedPrefix(InputTable):
    """Tokens at the head of a prompt that other requests begin with, too."""

    tokens: Count
    hit_rate: Share | None = None
    distinct: Count = 1
    zipf: Positive = 0.8


class RampGeneration(InputTable):
    generator: Name
    units: Length = 1


class RequestSpec(InputTable):
    name: Name
    rate: Positive
    peak: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """Planned for: rate x peak."""
    burst: Positive = 1.0
    """Squared coefficient of variation of the times between arrivals; 1: Poisson."""
    prompt: Length = 512
    """Text tokens, the shared prefix among them."""
    output: Length = 128
    trace: InputPath | None = None
    trace_format: Literal["azure", "mooncake", "csv"] = "csv"
    """`trace` gives prompt and output lengths together, in place of `prompt` and `output`."""
    media: list[RequestMedia] = Field(default_factory=list)
    prefix: SharedPrefix | None = None
    generates: RampGeneration | None = None
    slo: Slo | None = None
    """None: the application's."""
    weight: Positive = 1.0
    """Of one request in the goodput."""

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
    name: Name
    llm: Name
    workload: Workload = "online"
    qos: Name = "default"
    """Class of service, as the encoder service and admission know it."""
    slo: Slo = Slo()
    structures: list[Structure] | None = None
    """Structures that a plan may use for it; None: all. "+G": generator apart from the LLM."""
    requests: list[RequestSpec] = Field(min_length=1)


# Pool ---------------------------------------------------------------------------------------


class GpuSpec(InputTable):
    """One device type; overrides or adds to the table that comes with cornplug."""

    name: Name
    memory_gib: Positive
    bandwidth_gb_s: Positive
    bf16_tflops: Positive
    fp8_tflops: NonNegative = 0.0
    link_gb_s: Positive = 32.0
    """To another GPU of the node, one direction."""
    nic_gb_s: Positive = 25.0
    watts: NonNegative = 0.0
    nvlink: bool = False
    """Without it tensor parallelism ends at 2."""
    generation: Literal["ampere", "ada", "hopper", "blackwell", "cpu"] = "ampere"
    source: str = "given"


class NodeClass(InputTable):
    """Machines of one shape that can be had."""

    name: Name
    gpu: str
    gpus: Literal[1, 2, 4, 8] = 8
    price_per_hour: NonNegative | None = None
    """For the whole node; None: the price table's, by `shape`."""
    shape: str | None = None
    """An instance shape of the price table: p5.48xlarge."""
    stock: Annotated[int, Field(ge=0, strict=True)] = 64
    dram_gib: NonNegative = 512.0
    nic_gb_s: Positive | None = None
    host: str | None = None
    """Its address, for command lines; None: `cornplug launch --address HOST_n=...` sets it."""


# The rest -----------------------------------------------------------------------------------


class CacheOptions(InputTable):
    """Sizes among which the plan chooses, GiB of a node's DRAM in the store; 0: none."""

    embedding_gib: list[NonNegative] = Field(default=[0.0])
    prefix_gib: list[NonNegative] = Field(default=[0.0])


class PlanRules(InputTable):
    objective: Literal["cost", "goodput", "max-min"] = "cost"
    max_utilisation: Share = 0.95
    online_share: Share = 0.8
    """Share of a cell's capacity that online work may fill; the rest is for work that can wait."""
    n_plus_one: bool = True
    """An online application survives the loss of one replica of each of its services."""
    network_utilisation: Share = 0.7
    router: RouterPolicy = "power_of_two"
    """Of vllm-router and sglang-router; neither knows the work of a request."""
    split: Literal["fractional", "slices"] = "fractional"
    slices: Count = 1
    """With split = "slices": a request type's rate is served in multiples of rate / slices."""
    colocate: bool = True
    """Parts of GPUs may be planned for."""
    disaggregation_efficiency_p: Share = 0.9
    disaggregation_efficiency_d: Share = 0.92
    """AIConfigurator's constants for rate matching, until a profile says better."""
    interference: Share = 0.1
    """Speed that a replica loses to its neighbours on the same GPU."""
    simulate: bool = True
    seed: int = 0


class SolverOptions(InputTable):
    gap: NonNegative = 0.01
    work: Positive = 20.0
    """Million solver steps x non-zero coefficients at which a solve ends; a core does 0.3 to 2.5 a second.
    A step is a point at which HiGHS checks its limits. Their number depends on the input alone, and so does
    the plan."""
    time_limit_s: Positive = 60.0
    """Seconds after which a solve ends before its work is done. The plan then depends on the machine."""
    threads: Count = 1


class ChangeRules(InputTable):
    """The current deployment, and the cost that a change of it may have."""

    plan: InputPath
    horizon_hours: Positive = 24.0
    max_changes: int | None = None
    """Starts and role switches; None: any number."""
    min_dwell_s: NonNegative = 900.0
    start_s: NonNegative = 300.0
    """From a command to a serving replica: loading, graphs, warm-up."""
    role_switch: bool = False
    """SGLang's P and D replicas run with a transfer backend that can change their role (mooncake)."""
    role_switch_s: NonNegative = 30.0
    gain: Annotated[float, Field(ge=1, strict=True)] = 1.2
    """A new plan is worth it when it saves this times its switching cost."""


class PlanInput(InputTable):
    name: Name = "plan"
    components: list[Component] = Field(min_length=1)
    applications: list[Application] = Field(min_length=1)
    pool: list[NodeClass] = Field(min_length=1)
    gpus: list[GpuSpec] = Field(default_factory=list)
    prices: InputPath | None = None
    """A price table in place of cornplug's own, in the same format."""
    caches: CacheOptions = CacheOptions()
    rules: PlanRules = PlanRules()
    solver: SolverOptions = SolverOptions()
    change: ChangeRules | None = None

    @property
    def component(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}
