"""What a planner is told: the tables and fields of a plan's TOML file.

Only shapes and ranges are checked here, and what one table says of another. Reading the file,
and finding the line of an error, is `toml_source.py`; the meaning of a length is `lengths.py`.
Times are seconds, rates requests per second, memory GiB (2**30) unless a name says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

Kind = Literal["encoder", "llm", "generator"]
Engine = Literal["vllm", "sglang"]
Workload = Literal["online", "semi-online", "offline"]
Quantisation = Literal["none", "fp8", "awq", "gptq"]
RouterPolicy = Literal["least_work", "join_shortest_queue", "random"]
Structure = Literal["monolith", "E+PD", "P+D", "E+P+D", "+G"]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# Lengths ------------------------------------------------------------------------------------


class LogNormal(Table):
    """A log-normal length, cut off at `max` (drawn again beyond it)."""

    mean: Positive
    cv: NonNegative = 1.0
    """Standard deviation / mean."""
    max: Count = 1_000_000

    @model_validator(mode="after")
    def _max_above_mean(self) -> Self:
        if self.max < self.mean:
            raise ValueError(f"max: {self.max} is below the mean, {self.mean:g}")
        return self


class Histogram(Table):
    values: list[Count] = Field(min_length=1)
    weights: list[NonNegative] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if len(self.values) != len(self.weights) or sum(self.weights) <= 0:
            raise ValueError("weights: one for each of values, and not all zero")
        return self


Length = Annotated[int, Field(ge=0)] | LogNormal | Histogram

# Components ---------------------------------------------------------------------------------


class LLMShape(Table):
    """A language model's size. `from_config` in `shapes.py` reads it from a checkpoint."""

    kind: Literal["llm"] = "llm"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    parameters: Positive
    """All weights, of experts too."""
    active_parameters: Positive | None = None
    """What one token passes through; None: all of them."""
    mla_rank: int | None = None
    """kv_lora_rank + qk_rope_head_dim of a model with latent attention (MLA)."""
    max_context: Count = 32_768
    embedding_parameters: NonNegative = 0.0
    """Of all, those of embeddings and head: quantisation leaves them alone."""


class TowerShape(Table):
    kind: Literal["tower"] = "tower"
    layers: Count
    hidden: Count
    intermediate: Count
    parameters: Positive
    patches_per_token: Count = 1
    """Patches that the tower computes for one token that the LLM sees (Qwen2-VL: 4)."""


class GeneratorShape(Table):
    kind: Literal["generator"] = "generator"
    parameters: Positive
    flops_per_unit: Positive
    """Floating-point operations for one unit (an image, a second of speech)."""


class Throughput(Table):
    """Requests a second that one replica carries, as measured elsewhere; no times are known."""

    kind: Literal["throughput"] = "throughput"
    gpu: str
    tp: Count = 1
    pp: Count = 1
    engine: Engine | None = None
    quantisation: Quantisation = "none"
    role: Literal["E", "P", "D", "PD", "EPD", "G"] | None = None
    """For an LLM whose roles differ (DistServe's P 5.6 and D 10 requests/s); None: any role."""
    requests_per_s: Positive | dict[str, Positive]
    """For every request type alike, or by "application/request"."""
    tpot_s: dict[str, Positive] = Field(default_factory=dict)
    """Seconds per token at this rate, by request type, where the rate was measured under an SLO."""
    source: str = "given"


class Measured(Table):
    """Times measured on a device: inline points, or a CSV file of `cornplug profile`."""

    kind: Literal["table"] = "table"
    gpu: str
    tp: Count = 1
    pp: Count = 1
    engine: Engine | None = None
    quantisation: Quantisation = "none"
    file: Path | None = None
    prefill_tokens: list[Count] = Field(default_factory=list)
    prefill_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that computes so many prompt tokens."""
    decode_requests: list[Count] = Field(default_factory=list)
    decode_s: list[Positive] = Field(default_factory=list)
    """Seconds of one iteration that gives so many requests one token each."""
    kv_token_s: NonNegative = 0.0
    """Added to a decode iteration for each token of context in the batch."""
    mixed_factor: Positive = 1.0
    """An iteration of both kinds takes the longer of the two times this (Splitwise: 1.1)."""
    request_overhead_s: NonNegative = 0.0
    """Of an engine's API process, network and tokenizer, once a request, off the device."""
    encode_patches: list[Count] = Field(default_factory=list)
    encode_s: list[Positive] = Field(default_factory=list)
    units: list[Positive] = Field(default_factory=list)
    unit_s: list[Positive] = Field(default_factory=list)
    kv_tokens: Count | None = None
    """Tokens of KV cache that the engine reported; None: from shape and memory."""
    source: str = "measured"
    """Where, when and with what it was measured."""


class Roofline(Table):
    """Times from the GPU table: max(FLOP / (efficiency·peak), bytes / (efficiency·bandwidth))."""

    kind: Literal["roofline"] = "roofline"
    compute_efficiency: Share = 0.5
    bandwidth_efficiency: Share = 0.8
    step_overhead_s: NonNegative = 0.003
    request_overhead_s: NonNegative = 0.005


Profile = Annotated[Throughput | Measured | Roofline, Field(discriminator="kind")]


class Component(Table):
    name: Name
    kind: Kind
    model: str | None = None
    """What stands on the command line: a hub id or a folder. None: `checkpoint`."""
    checkpoint: Path | None = None
    """A folder with config.json; shape, and fingerprint where the weights are there, come from it."""
    shape: Annotated[LLMShape | TowerShape | GeneratorShape, Field(discriminator="kind")] | None = None
    fingerprint: str | None = None
    """Of the tower's weights: encoders with the same one are one service."""
    tower_of: Name | None = None
    """Encoder only: the LLM component whose checkpoint holds this tower."""
    quantisations: list[Quantisation] = ["none"]
    tp: list[Count] = [1, 2, 4, 8]
    pp: list[Count] = [1]
    shares: list[Positive] = [1.0]
    """Parts of one GPU that a replica may have: 0.25, 0.5, 1."""
    engines: list[Engine] = ["vllm", "sglang"]
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    speculative_model: str | None = None
    acceptance: Share = 0.0
    """Share of draft tokens accepted, as measured. 0: speculation is not planned for."""
    max_model_len: Count | None = None
    profiles: list[Profile] = Field(default=[Roofline()], min_length=1)
    """The first that fits a cell is taken."""


# Applications -------------------------------------------------------------------------------


class Slo(Table):
    """Bounds on one percentile of the requests' times. What is None is not bounded."""

    percentile: Literal["mean", "p50", "p95", "p99"] = "p95"
    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None


class Media(Table):
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


class SharedPrefix(Table):
    """Tokens at the head of a prompt that other requests begin with, too."""

    tokens: Count
    hit_rate: Share | None = None
    distinct: Count = 1
    zipf: Positive = 0.8


class Generation(Table):
    generator: Name
    units: Length = 1


class Request(Table):
    name: Name
    rate: Positive
    peak: Annotated[float, Field(ge=1)] = 1.0
    """Planned for: rate x peak."""
    burst: Positive = 1.0
    """Squared coefficient of variation of the times between arrivals; 1: Poisson."""
    prompt: Length = 512
    """Text tokens, the shared prefix among them."""
    output: Length = 128
    trace: Path | None = None
    trace_format: Literal["azure", "mooncake", "csv"] = "csv"
    """`trace` gives prompt and output lengths together, in place of `prompt` and `output`."""
    media: list[Media] = Field(default_factory=list)
    prefix: SharedPrefix | None = None
    generates: Generation | None = None
    slo: Slo | None = None
    """None: the application's."""
    weight: Positive = 1.0
    """Of one request in the goodput."""


class Application(Table):
    name: Name
    llm: Name
    workload: Workload = "online"
    qos: Name = "default"
    """Class of service, as the encoder service and admission know it."""
    slo: Slo = Slo()
    structures: list[Structure] | None = None
    """What may be planned for it; None: all. "+G": generator apart from the LLM."""
    requests: list[Request] = Field(min_length=1)


# Pool ---------------------------------------------------------------------------------------


class Gpu(Table):
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


class NodeClass(Table):
    """Machines of one shape that can be had."""

    name: Name
    gpu: str
    gpus: Literal[1, 2, 4, 8] = 8
    price_per_hour: NonNegative | None = None
    """For the whole node; None: the price table's, by `shape`."""
    shape: str | None = None
    """An instance shape of the price table: p5.48xlarge."""
    stock: Annotated[int, Field(ge=0)] = 64
    dram_gib: NonNegative = 512.0
    nic_gb_s: Positive | None = None
    host: str | None = None
    """For launch scripts: where it is. None: HOST_n, to be filled in."""


# The rest -----------------------------------------------------------------------------------


class Caches(Table):
    """Sizes among which the plan chooses, GiB of a node's DRAM in the store; 0: none."""

    embedding_gib: list[NonNegative] = [0.0]
    prefix_gib: list[NonNegative] = [0.0]


class Rules(Table):
    objective: Literal["cost", "goodput", "max-min"] = "cost"
    max_utilisation: Share = 0.95
    online_share: Share = 0.8
    """Of a cell's capacity that online work may fill; the rest is for what can wait."""
    n_plus_one: bool = True
    """An online application survives the loss of one replica of each of its services."""
    network_utilisation: Share = 0.7
    router: RouterPolicy = "least_work"
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


class Solver(Table):
    gap: NonNegative = 0.01
    time_limit_s: Positive = 20.0
    name: Literal["auto", "highs", "cbc"] = "auto"
    threads: Count = 1


class Change(Table):
    """What runs now, and what a change of it may cost."""

    plan: Path
    horizon_hours: Positive = 24.0
    max_changes: int | None = None
    """Starts and role switches; None: any number."""
    min_dwell_s: NonNegative = 900.0
    start_s: NonNegative = 300.0
    """From a command to a serving replica: loading, graphs, warm-up."""
    role_switch_s: NonNegative = 30.0
    gain: Annotated[float, Field(ge=1)] = 1.2
    """A new plan is worth it when it saves this times its switching cost."""


class PlanInput(Table):
    name: Name = "plan"
    components: list[Component] = Field(min_length=1)
    applications: list[Application] = Field(min_length=1)
    pool: list[NodeClass] = Field(min_length=1)
    gpus: list[Gpu] = Field(default_factory=list)
    prices: Path | None = None
    """A price table in place of cornplug's own, in the same format."""
    caches: Caches = Caches()
    rules: Rules = Rules()
    solver: Solver = Solver()
    change: Change | None = None

    @property
    def component(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}
