"""A plan, as stored in `plan.json`. Reading it needs no solver, GPU table or engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.latency_forecast import LatencyForecast, PlanRecord
from cornplug.planner.parallelism import Parallelism

FORMAT: Final = 1


class PlannedNodes(PlanRecord):
    name: str
    gpu: str
    gpus: int
    count: int
    price_per_hour: float
    """Price of one node."""
    spot: bool = False
    """Whether the provider may reclaim all nodes together."""
    idle_gpus: float = 0.0
    """Idle GPUs of the whole class, paid for and free for other work."""
    hosts: list[str] = Field(default_factory=list)


class PlannedHour(PlanRecord):
    """Machines that the load of one hour of the day needs."""

    hour: int
    """Start of the hour, 0 to 23."""
    nodes: dict[str, int]
    """Number of nodes by node class. The rest of `Plan.nodes` could be released."""
    cost_per_hour: float


class EngineSettings(PlanRecord):
    """Decisions that become engine flags. None keeps the engine's default."""

    max_model_len: int
    max_batch: int
    """Maximum number of requests that decode together in each attention-DP group."""
    chunk_tokens: int
    """Prompt tokens per iteration in each attention-DP group."""
    kv_tokens: int
    """KV tokens of each attention-DP group."""
    kv_bytes: int
    """Bytes of the KV cache on one rank."""
    memory_share: float
    """Share of a GPU's memory for this replica."""
    weights_bytes: int
    """Bytes of weights on one rank."""
    attention_backend: str | None = None
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    speculative_tokens: int = 0
    speculative_model: str | None = None
    priority: int = 0
    """Larger is more urgent. `vllm_flags.py` and `sglang_flags.py` convert it to each engine's order."""
    prefill_tokens_s: float | None = None
    """Prompt tokens per second and replica at its chunk size, for admission control."""


class KVGeometry(PlanRecord):
    """Dimensions that determine the size of the prefill-decode buffer (2·L·N·H·D·bytes)."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    mla: bool = False
    max_prompt_tokens: int


class QueueForecast(PlanRecord):
    """Longest queue of one replica in the plan's simulation. A lower limit would reject planned load."""

    requests: int
    prompt_tokens: int
    """Prompt tokens of requests that had not finished prefill, including cached tokens."""


class PlannedNamespace(PlanRecord):
    """An application's share of the store, as in the settings `store.namespaces.APP`."""

    share: float = 0.0
    ceiling: float = 1.0
    priority: int = 0
    ttl_s: float | None = None
    pinned: bool = False


class PlannedApplication(PlanRecord):
    """An application's settings, apart from its routes."""

    name: str
    tenant: str | None = None
    """`cache_salt` of the application's requests."""
    system_prompt: str | None = None
    prefixes: list[str] = Field(default_factory=list)
    namespace: PlannedNamespace | None = None


class ReplicaGroup(PlanRecord):
    """Identical replicas of one cell."""

    name: str
    service: str
    tasks: str
    """Tasks out of E (encode), P (prefill), D (decode), G (generate): "EPD"."""
    components: list[str]
    model: str
    """LLM (or tower, or generator), as on the command line."""
    encoder_models: list[str] = Field(default_factory=list)
    """Models whose towers an encoder group serves."""
    engine: Literal["vllm", "sglang", "cornplug", "external"]
    """"cornplug" is the encoder service. "external" is a generator that another server runs."""
    nodes: str
    gpu: str
    tp: int
    pp: int
    dp: int = 1
    """Attention-DP groups per replica. Each has `tp` GPUs and its own requests and KV."""
    dcp: int = 1
    """Decode context parallelism: GPUs of a group that share a request's KV."""
    pcp: int = 1
    """Prefill context parallelism: groups of `tp` GPUs that share a prompt's tokens."""
    expert_parallel: bool = False
    """Whether each of the tp * dp * pcp GPUs has whole experts."""
    share: float
    """Share of a GPU. 1 means whole GPUs."""
    quantisation: str
    replicas: int
    extra_replicas: int = 0
    """Number of `replicas` on otherwise idle GPUs. They cost nothing, and the SLOs do not need them."""
    placement: list[list[int]] = Field(default_factory=list)
    """[index of the node in its class, first GPU] of each replica."""
    utilisation: float
    """Utilisation at the planned rates, as a share of capacity."""
    capacity: dict[str, float]
    """Maximum rate by request class, if one replica serves only that class."""
    tier_s: float | None = None
    queue: QueueForecast | None = None
    """None if the plan was not simulated."""
    settings: EngineSettings | None = None
    kv: KVGeometry | None = None
    workload: Literal["online", "semi-online", "offline"] = "online"
    """Most urgent workload that the group serves."""
    router: str = "power_of_two"
    apps: list[str] = Field(default_factory=list)
    profile: str
    """Source of the times. "roofline ..." is an estimate, not a measurement."""
    since: float | None = None
    """Unix time at which the replicas were started, for the minimum dwell time."""
    ports: list[int] = Field(default_factory=list)
    """Port of each replica. Empty: consecutive ports on each host."""
    fixed_ports: bool = False
    """Whether an apps file sets the ports, so that `--apply` keeps them."""
    tower: Literal["engine", "service"] = "engine"
    """Location of the vision tower if encoder services have all media of an LLM group."""
    flags: list[str] | None = None
    """Flags from an apps file. They replace `settings`; all other flags keep the engine's defaults."""
    env: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    """Command of an external server to launch, with "{port}" as the placeholder for its port."""
    health: str = "/health"
    """Path of that server's health check."""

    @property
    def ranks(self) -> int:
        """Number of processes (one per GPU) of one replica."""
        return self.parallelism.ranks

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.dp, self.dcp, self.pcp)


class RouteStage(PlanRecord):
    tasks: str
    groups: dict[str, float]
    """Weight by group. The weights of a stage sum to 1."""


class PlanRoute(PlanRecord):
    """Route of a share of a request class."""

    app: str
    request: str
    structure: str
    rate: float
    stages: list[RouteStage]


class CacheSize(PlanRecord):
    name: str
    kind: Literal["embedding", "prefix"]
    component: str
    gib: float | None
    """None in a plan from an apps file, for a share of the host's memory."""
    hit_rate: dict[str, float]
    """Expected hit rate by request class."""


class QosReservation(PlanRecord):
    """Share of an encoder service that is reserved for a class of service."""

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
    """Whether a search reached the wall-clock limit. Another run may then find another plan."""


class BindingConstraint(PlanRecord):
    """A constraint that keeps the cost from being lower."""

    constraint: str
    text: str
    slack: float
    saves_per_hour: float | None = None
    """Savings in dollars per hour without this constraint, if computed."""


class PlanAlternative(PlanRecord):
    name: str
    text: str
    cost_per_hour: float | None
    """None if the alternative cannot meet the SLOs with this pool."""
    reason_against: str


class CurvePoint(PlanRecord):
    slo_factor: float
    """Factor on every SLO bound."""
    cost_per_hour: float | None


class PlanExplanation(PlanRecord):
    binding: list[BindingConstraint] = Field(default_factory=list)
    alternatives: list[PlanAlternative] = Field(default_factory=list)
    monolith: str = ""
    """Conditions under which the monolith wins, and its advantage here."""
    curve: list[CurvePoint] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class TimesCorrection(PlanRecord):
    """Slowdown of a service's replicas relative to their profile, from their engines' metrics."""

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
    """Factor on the profile's encode and prefill times. Below 1 means faster than the profile."""
    decode: float = 1.0
    """Factor on the profile's decode iteration times."""

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.dp, self.dcp, self.pcp)


class Plan(PlanRecord):
    format: Literal[1] = FORMAT
    name: str
    objective: str
    cost_per_hour: float
    goodput: float | None = None
    nodes: list[PlannedNodes]
    groups: list[ReplicaGroup]
    routes: list[PlanRoute]
    hours: list[PlannedHour] = Field(default_factory=list)
    """Nodes by hour of the day, if the input has hourly rates."""
    latency_forecasts: list[LatencyForecast]
    caches: list[CacheSize] = Field(default_factory=list)
    reservations: list[QosReservation] = Field(default_factory=list)
    applications: list[PlannedApplication] = Field(default_factory=list)
    """Applications with a tenant, a namespace or prompts."""
    store_flags: list[str] = Field(default_factory=list)
    """Flags of each host's store, in addition to those that follow from the plan."""
    listen: str | None = None
    """Address that servers listen on. None: all addresses of each host, or the address of the only host."""
    allow_anonymous: bool = False
    """Whether encoder services that other hosts can reach accept requests without a key."""
    router_ports: int = 0
    """Offset of the routers' ports. `--apply` starts new routers alongside the old ones."""
    proof: OptimalityProof
    explanation: PlanExplanation = PlanExplanation()
    corrections: list[TimesCorrection] = Field(default_factory=list)
    """Corrections of profiles that `cornplug replan` found. A re-plan from this plan applies them."""
    input_digest: str
    """SHA-256 of the input file."""
    cornplug: str

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan. Raises ConfigError for an unreadable or invalid file."""
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
