"""A deployment, and a plan as stored in `plan.json`. Reading either requires no solver, GPU table or engine.

A deployment is the input of the launcher. A plan is a deployment with the results of the planner, such as
forecasts for its request classes: latency bounds and simulated times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from cornplug.errors import ConfigError


class PlanRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestTimes(PlanRecord):
    """Latency statistics, in seconds or as slowdowns.

    A value is None if the class has no such latency, for example TPOT if all outputs have one token.
    """

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def value_at(self, percentile: str) -> float | None:
        """Return the value of a statistic, for example "mean" or "p50"."""
        value: float | None = getattr(self, percentile)
        return value


class PercentileSlo(PlanRecord):
    """Bounds on one percentile of a class's latencies.

    A slowdown is a multiple of the latency on an idle replica.
    """

    percentile: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    ttft_slowdown: float | None = None
    tpot_slowdown: float | None = None
    e2e_slowdown: float | None = None


class SimulatedSlowdown(PlanRecord):
    """Simulated latencies of a class, divided by the latencies of the same requests on an idle replica."""

    idle: str
    """Name of the idle replica, for example "A100-80 TP8"."""
    ttft: RequestTimes = RequestTimes()
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()


class ForecastBound(NamedTuple):
    """Bound on a latency at a percentile, in seconds or as a slowdown, and the simulated value."""

    quantity: str
    """"ttft", "tpot" or "e2e"."""
    percentile: str
    bound: float | None
    simulated: float | None
    slowdown: bool


class JobForecast(PlanRecord):
    """Forecast for a job, a fixed number of requests with a deadline."""

    requests: int
    deadline_hours: float
    done_hours: float | None = None
    """Simulated time from the first request to the last response (P99), or None without a simulation."""
    dollars: float
    """Cost of the job in dollars: its share of the plan's cost until the deadline, in proportion to its share
    of each group's load. The cost includes idle GPUs of the groups' nodes."""


class LatencyTargets(PlanRecord):
    """Latency bounds and priority of one request class."""

    app: str
    request: str
    priority: int = 0
    """Scheduling priority relative to other classes. Larger is more urgent."""
    prefix_hit_rate: float = 0.0
    """Share of requests whose shared prefix is cached. A router must send each such request to a replica that
    has the prefix."""
    slo_percentile: str
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    slo_also: list[PercentileSlo] = Field(default_factory=list)
    """Bounds on other percentiles, and on slowdowns."""
    e2e: RequestTimes = RequestTimes()
    """Simulated E2E latency. Empty if the plan was not simulated."""

    @property
    def class_name(self) -> str:
        """Name of the request class, such as "chat/short"."""
        return f"{self.app}/{self.request}"

    @property
    def percentile_slos(self) -> list[PercentileSlo]:
        """Bounds of the class, one item per percentile. The first item may have no bounds."""
        first = PercentileSlo(
            percentile=self.slo_percentile,
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
            e2e_s=self.slo_e2e_s,
        )
        return [first, *self.slo_also]

    @property
    def ttft_bound_s(self) -> float | None:
        """Loosest TTFT bound in seconds, or None. A request with a larger TTFT misses all TTFT bounds."""
        return max((table.ttft_s for table in self.percentile_slos if table.ttft_s is not None), default=None)


class LatencyForecast(LatencyTargets):
    """Latency bounds of one request class, and the class's latencies in the simulation of the complete
    plan."""

    rate: float
    served: float
    """Requests per second that the plan serves. This is below `rate` only if the objective maximises
    goodput."""
    slowdown: SimulatedSlowdown | None = None
    """Simulated slowdown, if a slowdown is bounded."""
    job: JobForecast | None = None
    ttft: RequestTimes = RequestTimes()
    """Simulated TTFT. `ttft`, `tpot` and `e2e` are empty if the plan was not simulated."""
    tpot: RequestTimes = RequestTimes()

    @property
    def bounds(self) -> list[ForecastBound]:
        """Simulated value and bound (or None) of each latency, at each percentile in `percentile_slos`."""
        slower = self.slowdown or SimulatedSlowdown(idle="")
        return [
            ForecastBound(quantity, table.percentile, bound, times.value_at(table.percentile), slowdown)
            for table in self.percentile_slos
            for quantity, bound, times, slowdown in (
                ("ttft", table.ttft_s, self.ttft, False),
                ("ttft", table.ttft_slowdown, slower.ttft, True),
                ("tpot", table.tpot_s, self.tpot, False),
                ("tpot", table.tpot_slowdown, slower.tpot, True),
                ("e2e", table.e2e_s, self.e2e, False),
                ("e2e", table.e2e_slowdown, slower.e2e, True),
            )
        ]


class Nodes(PlanRecord):
    name: str
    gpu: str
    gpus: int
    count: int
    hosts: list[str] = Field(default_factory=list)


class PlannedNodes(Nodes):
    price_per_hour: float
    """Price of one node."""
    spot: bool = False
    """Whether the provider may reclaim all nodes together."""
    idle_gpus: float = 0.0
    """Number of idle GPUs on all nodes of the class. They are paid for, and are free for other work."""


class PlannedHour(PlanRecord):
    """Machines that are needed for the load of one hour of the day."""

    hour: int
    """Start of the hour, 0 to 23."""
    nodes: dict[str, int]
    """Number of nodes by node class. The other nodes in `Plan.nodes` could be released during this hour."""
    cost_per_hour: float


class EngineSettings(PlanRecord):
    """Settings that become engine flags. For a setting that is None, the engine uses its default."""

    max_model_len: int
    max_batch: int
    """Maximum number of requests that decode together in each attention-DP group."""
    chunk_tokens: int
    """Maximum number of prompt tokens per iteration in each attention-DP group."""
    kv_tokens: int
    """Number of tokens in the KV cache of each attention-DP group."""
    kv_bytes: int
    """Size of the KV cache on one rank in bytes."""
    memory_share: float
    """Share of a GPU's memory that this replica may use."""
    weights_bytes: int
    """Size of the weights on one rank in bytes."""
    attention_backend: str | None = None
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    speculative_tokens: int = 0
    speculative_model: str | None = None
    priority: int = 0
    """Priority of the replicas' requests. Larger is more urgent. `vllm_flags.py` and `sglang_flags.py`
    convert the priority to the order of each engine."""
    prefill_tokens_s: float | None = None
    """Number of prompt tokens per second that a replica processes with its chunk size, for admission
    control."""


class KVGeometry(PlanRecord):
    """Dimensions that determine the size of the buffer for KV transfers between prefill and decode
    engines."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    mla: bool = False
    max_prompt_tokens: int


class QueueForecast(PlanRecord):
    """Longest queue of one replica in the plan's simulation.

    An engine whose queue limit is lower would reject requests of the planned load.
    """

    requests: int
    prompt_tokens: int
    """Number of prompt tokens in requests that had not finished prefill, including cached tokens."""


class PlannedNamespace(PlanRecord):
    """Share of the store for one application. The fields are the same as in the settings
    `store.namespaces.HTTP_APP`."""

    share: float = 0.0
    ceiling: float = 1.0
    priority: int = 0
    ttl_s: float | None = None
    pinned: bool = False


class PlannedApplication(PlanRecord):
    """Settings of an application, except its routes."""

    name: str
    tenant: str | None = None
    """Tenant whose name is the `cache_salt` of the application's requests, or None."""
    system_prompt: str | None = None
    prefixes: list[str] = Field(default_factory=list)
    namespace: PlannedNamespace | None = None


class ReplicaGroup(PlanRecord):
    """Group of identical replicas of one service."""

    name: str
    service: str
    tasks: str
    """Tasks of the replicas, for example "EPD": E (encode), P (prefill), D (decode), G (generate)."""
    components: list[str]
    model: str
    """LLM, tower or generator, as a command-line argument."""
    encoder_models: list[str] = Field(default_factory=list)
    """Models whose towers an encoder group serves."""
    engine: Literal["vllm", "sglang", "cornplug", "external"]
    """Program that runs the replicas. "cornplug" is the encoder service, and "external" is another server
    that runs a generator."""
    nodes: str
    gpu: str
    tp: int
    pp: int
    dp: int = 1
    """Number of attention-DP groups per replica. Each group has `tp` GPUs and its own requests and KV."""
    dcp: int = 1
    """Degree of decode context parallelism: number of GPUs in a group that share a request's KV."""
    pcp: int = 1
    """Degree of prefill context parallelism: number of groups of `tp` GPUs that share a prompt's tokens."""
    expert_parallel: bool = False
    """Whether each of the tp * dp * pcp GPUs has complete experts, instead of a part of every expert."""
    share: float
    """Share of a GPU that a replica uses. 1 means that a replica uses one or more complete GPUs."""
    quantisation: str
    replicas: int
    placement: list[list[int]] = Field(default_factory=list)
    """[index of the node in its class, first GPU] for each replica."""
    capacity: dict[str, float] = Field(default_factory=dict)
    """Maximum requests per second of one replica by request class, if the replica serves only that class.
    Empty if the capacity is not known."""
    queue: QueueForecast | None = None
    """Longest queue of a replica, or None if the plan was not simulated."""
    settings: EngineSettings | None = None
    kv: KVGeometry | None = None
    workload: Literal["online", "semi-online", "offline"] = "online"
    """Most urgent workload that the group serves."""
    router: str = "power_of_two"
    apps: list[str] = Field(default_factory=list)
    ports: list[int] = Field(default_factory=list)
    """Port of each replica. If empty, replicas use consecutive ports on each host."""
    fixed_ports: bool = False
    """Whether an apps file sets the ports, so that `--apply` keeps them."""
    tower: Literal["engine", "service"] = "engine"
    """Process that runs the vision tower if encoder services encode all media of an LLM group."""
    flags: list[str] | None = None
    """Flags from an apps file, or None. They replace `settings`, and all other flags keep the engine's
    defaults."""
    env: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    """Command of an external server to launch, with "{port}" as the placeholder for its port."""
    health: str = "/health"
    """URL path of the external server's health check."""

    @property
    def ranks(self) -> int:
        """Number of processes in one replica, one per GPU."""
        return self.parallelism.ranks

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.dp, self.dcp, self.pcp)


class PlannedGroup(ReplicaGroup):
    profile: str
    """Source of the replicas' times. "roofline ..." is an estimate, all other sources are measurements."""
    utilisation: float
    """Share of the capacity that is used at the planned rates."""
    extra_replicas: int = 0
    """Number of `replicas` on GPUs that would otherwise be idle. These replicas cost nothing, and are not
    needed to meet the SLOs."""
    tier_s: float | None = None
    since: float | None = None
    """Unix time at which the replicas were started, for the minimum dwell time."""


class RouteStage(PlanRecord):
    tasks: str
    groups: dict[str, float]
    """Group -> share of the stage's requests. The shares of a stage add up to 1."""


class PlanRoute(PlanRecord):
    """Route of a class's requests, or of a part of these requests."""

    app: str
    request: str
    structure: str
    rate: float
    stages: list[RouteStage]

    @property
    def class_name(self) -> str:
        """Name of the request class, such as "chat/short"."""
        return f"{self.app}/{self.request}"


class CacheSize(PlanRecord):
    name: str
    kind: Literal["embedding", "prefix"]
    component: str
    gib: float | None
    """Size in GiB. None if an apps file does not set the store's size."""
    hit_rate: dict[str, float] = Field(default_factory=dict)
    """Expected hit rate by request class. Empty if hit rates are not known."""


class QosReservation(PlanRecord):
    """Share of the encoder services that is reserved for a class of service."""

    qos: str
    share: float
    priority: int
    deadline_s: float | None = None
    apps: list[str] = Field(default_factory=list)
    """Applications in this class of service."""


class OptimalityProof(PlanRecord):
    status: Literal["optimal", "feasible"]
    solver: str
    seconds: float
    first_s: float | None = None
    incumbent: float
    bound: float
    gap: float
    unit: str = ""
    """Unit of `incumbent` and `bound`."""
    timed_out: bool = False
    """Whether a search reached its time limit. If so, another run may find another plan."""


class BindingConstraint(PlanRecord):
    """Constraint that prevents a lower cost."""

    constraint: str
    text: str
    slack: float
    saves_per_hour: float | None = None
    """Savings in dollars per hour without this constraint, or None if they were not computed."""


class PlanAlternative(PlanRecord):
    name: str
    text: str
    cost_per_hour: float | None
    """Cost in dollars per hour, or None if the alternative cannot meet the SLOs with this pool."""
    reason_against: str


class CurvePoint(PlanRecord):
    slo_factor: float
    """Factor by which all SLO bounds are multiplied."""
    cost_per_hour: float | None


class PlanExplanation(PlanRecord):
    binding: list[BindingConstraint] = Field(default_factory=list)
    alternatives: list[PlanAlternative] = Field(default_factory=list)
    monolith: str = ""
    """Text about whether the monolith (every request in one engine) is cheaper, and at which loads."""
    curve: list[CurvePoint] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class TimesCorrection(PlanRecord):
    """Measured slowdown of a service's replicas relative to their profile, from the engines' metrics."""

    service: str
    engine: str
    gpu: str
    tp: int
    pp: int
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    share: float
    quantisation: str
    prefill: float = 1.0
    """Factor by which the profile's encode and prefill times are multiplied. Below 1 means faster."""
    decode: float = 1.0
    """Factor by which the profile's decode iteration times are multiplied."""

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.dp, self.dcp, self.pcp)


class Deployment(PlanRecord):
    """Processes that the launcher starts on each host, and their settings."""

    format: Literal[1] = 1
    name: str
    nodes: Sequence[Nodes]
    groups: Sequence[ReplicaGroup]
    routes: list[PlanRoute]
    latency_forecasts: Sequence[LatencyTargets]
    """Latency targets of each request class. The targets in a plan include the forecast."""
    caches: list[CacheSize] = Field(default_factory=list)
    reservations: list[QosReservation] = Field(default_factory=list)
    applications: list[PlannedApplication] = Field(default_factory=list)
    """Applications that have a tenant, a namespace or prompts."""
    store_flags: list[str] = Field(default_factory=list)
    """Flags of each host's store, in addition to those that follow from the deployment."""
    listen: str | None = None
    """Address on which servers listen. None means all addresses of each host, or the address of the only
    host."""
    allow_anonymous: bool = False
    """Whether encoder services that other hosts can reach accept requests without a key."""
    router_ports: int = 0
    """Offset of the routers' ports. `--apply` changes it, so that new routers start while the old routers
    run."""

    @model_validator(mode="wrap")
    @classmethod
    def _plan_or_deployment(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Deployment:
        """Return a `Plan` if the data is a plan, although a deployment was expected."""
        planned = cls is Deployment and isinstance(data, dict) and "proof" in data
        return Plan.model_validate(data) if planned else handler(data)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file such as plan.json. Raises ConfigError if the file cannot be read or is invalid."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as e:
            raise ConfigError(
                str(path), f"cannot be read ({e.strerror})", "Pass the path of a plan.json"
            ) from None
        except ValidationError as e:
            first = e.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "it"
            problem = f"{field}: {first['msg']}"
            raise ConfigError(str(path), problem, "Create a new plan with `cornplug plan`") from None

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")


class Plan(Deployment):
    """Deployment that the planner chose, with the planner's forecasts, proof and explanation."""

    objective: str
    cost_per_hour: float
    goodput: float | None = None
    nodes: list[PlannedNodes]
    groups: list[PlannedGroup]
    hours: list[PlannedHour] = Field(default_factory=list)
    """Nodes that each hour of the day needs. Empty if the input has no hourly rates."""
    latency_forecasts: list[LatencyForecast]
    proof: OptimalityProof
    explanation: PlanExplanation = PlanExplanation()
    corrections: list[TimesCorrection] = Field(default_factory=list)
    """Corrections of profiles that `cornplug replan` found. A new plan that is based on this plan applies
    them."""
    input_digest: str
    """SHA-256 of the input file."""
    cornplug: str


@dataclass(frozen=True)
class Parallelism:
    """Degrees of parallelism that determine how a replica is divided among GPUs."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Number of attention-DP groups of `tp` GPUs, each with its own attention weights, requests and KV."""
    dcp: int = 1
    """Number of GPUs in a group among which a request's KV is divided."""
    pcp: int = 1
    """Number of groups of `tp` GPUs that share the tokens of each prompt and decode different requests."""

    @property
    def groups(self) -> int:
        """Number of groups of `tp` GPUs in one pipeline stage."""
        return self.dp * self.pcp

    @property
    def expert_ranks(self) -> int:
        """Number of GPUs in one pipeline stage. Experts are divided among these GPUs."""
        return self.tp * self.groups

    @property
    def ranks(self) -> int:
        """Number of processes in the replica, one per GPU."""
        return self.pp * self.expert_ranks
