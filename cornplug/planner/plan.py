"""A plan, as `plan.json` holds it: readable without a solver, a GPU table or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.latency_forecast import LatencyForecast, PlanRecord

FORMAT: Final = 1


class PlannedNodes(PlanRecord):
    name: str
    gpu: str
    gpus: int
    count: int
    price_per_hour: float
    """Of one."""
    spot: bool = False
    """The provider may take all of them back at once."""
    idle_gpus: float = 0.0
    """Of all of them: paid for, and free for other work."""
    hosts: list[str] = Field(default_factory=list)


class PlannedHour(PlanRecord):
    """An hour of the day: the plan's machines that its load needs."""

    hour: int
    """From its beginning, 0 to 23."""
    nodes: dict[str, int]
    """Class of nodes -> how many; the rest of `Plan.nodes` could be given back."""
    cost_per_hour: float


class EngineSettings(PlanRecord):
    """Decisions that become flags; None where the engine's own default stands."""

    max_model_len: int
    max_batch: int
    """Requests that decode together, in each attention-DP group."""
    chunk_tokens: int
    """Prompt tokens of one iteration, in each attention-DP group."""
    kv_tokens: int
    """Of each attention-DP group."""
    kv_bytes: int
    """Of the KV cache, one rank."""
    memory_share: float
    """Of a GPU's memory, for this replica."""
    weights_bytes: int
    """One rank."""
    attention_backend: str | None = None
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    speculative_tokens: int = 0
    speculative_model: str | None = None
    priority: int = 0
    """Larger is more urgent; `vllm_flags.py` and `sglang_flags.py` know each engine's direction."""
    prefill_tokens_s: float | None = None
    """Prompt tokens a second that one replica computes, at its chunk size: for admission."""


class KVGeometry(PlanRecord):
    """Dimensions that size the prefill-decode buffer (2·L·N·H·D·bytes)."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    mla: bool = False
    max_prompt_tokens: int


class QueueForecast(PlanRecord):
    """Most that waited at one replica in the plan's simulation: a limit below it rejects planned load."""

    requests: int
    prompt_tokens: int
    """Of requests whose prefill had not ended, cached tokens included."""


class PlannedNamespace(PlanRecord):
    """An application's part of the store: the settings `store.namespaces.APP`."""

    share: float = 0.0
    ceiling: float = 1.0
    priority: int = 0
    ttl_s: float | None = None
    pinned: bool = False


class PlannedApplication(PlanRecord):
    """An application's settings beside its routes."""

    name: str
    tenant: str | None = None
    """`cache_salt` of its requests."""
    system_prompt: str | None = None
    prefixes: list[str] = Field(default_factory=list)
    namespace: PlannedNamespace | None = None


class ReplicaGroup(PlanRecord):
    """Equal replicas of one cell."""

    name: str
    service: str
    tasks: str
    """Its tasks out of E (encode), P (prefill), D (decode), G (generate): "EPD"."""
    components: list[str]
    model: str
    """Of its LLM (or tower, or generator), for the command line."""
    encoder_models: list[str] = Field(default_factory=list)
    """Models whose towers an encoder group serves."""
    engine: Literal["vllm", "sglang", "cornplug", "external"]
    """cornplug: the encoder service. external: a generator that some other server runs."""
    nodes: str
    gpu: str
    tp: int
    pp: int
    dp: int = 1
    """Attention-DP groups of a replica: each has `tp` GPUs, and requests and KV of its own."""
    dcp: int = 1
    """Decode context parallelism: GPUs of a group that divide a request's KV among them."""
    pcp: int = 1
    """Prefill context parallelism: groups of `tp` GPUs that divide each prompt's tokens."""
    expert_parallel: bool = False
    """Whole experts on each of the tp * dp * pcp GPUs."""
    share: float
    """Of a GPU; 1 for whole ones."""
    quantisation: str
    replicas: int
    extra_replicas: int = 0
    """Of `replicas`: on GPUs that would be idle. They cost nothing, and the SLOs do not need them."""
    placement: list[list[int]] = Field(default_factory=list)
    """For each replica: [node's number in its class, first GPU]."""
    utilisation: float
    """Of its capacity, at the planned rates."""
    capacity: dict[str, float]
    """Request class -> rate of it alone, one replica."""
    tier_s: float | None = None
    queue: QueueForecast | None = None
    """None where the plan was not simulated."""
    settings: EngineSettings | None = None
    kv: KVGeometry | None = None
    workload: Literal["online", "semi-online", "offline"] = "online"
    """The most urgent that it serves."""
    router: str = "power_of_two"
    apps: list[str] = Field(default_factory=list)
    profile: str
    """Source of its times; "roofline ..." is an estimate, never a measurement."""
    since: float | None = None
    """Unix time at which its replicas were started, for the minimum dwell."""
    ports: list[int] = Field(default_factory=list)
    """Of each replica; empty: counted through on each host."""
    fixed_ports: bool = False
    """An apps file names them: `--apply` gives no others."""
    tower: Literal["engine", "service"] = "engine"
    """Place of the vision tower where encoder services have all media of an LLM's group."""
    flags: list[str] | None = None
    """Of an apps file: these, and the engine's own defaults, in place of `settings`."""
    env: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    """Of an external server that is launched, with "{port}" for its port."""
    health: str = "/health"
    """Path at which that server answers 200."""

    @property
    def ranks(self) -> int:
        """Processes of one replica, one a GPU."""
        return self.tp * self.pp * self.dp * self.pcp


class RouteStage(PlanRecord):
    tasks: str
    groups: dict[str, float]
    """Group -> weight; the weights of a stage sum to 1."""


class PlanRoute(PlanRecord):
    """A share of a request class, and where it goes."""

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
    """None, of an apps file: the host's memory decides when the store starts."""
    hit_rate: dict[str, float]
    """Request class -> expected share of hits."""


class QosReservation(PlanRecord):
    """Part of an encoder service that a class of service is promised."""

    qos: str
    share: float
    priority: int
    deadline_s: float | None = None
    apps: list[str] = Field(default_factory=list)
    """Applications of this class."""


class OptimalityProof(PlanRecord):
    status: Literal["optimal", "feasible"]
    solver: str
    seconds: float
    first_s: float | None = None
    incumbent: float
    bound: float
    gap: float
    unit: str = ""
    """Of incumbent and bound."""
    timed_out: bool = False
    """The wall clock ended a search: another run may find another plan."""


class BindingConstraint(PlanRecord):
    """A constraint that holds the cost up."""

    constraint: str
    text: str
    slack: float
    saves_per_hour: float | None = None
    """Dollars an hour that the plan would save without it, where computed."""


class PlanAlternative(PlanRecord):
    name: str
    text: str
    cost_per_hour: float | None
    """None: it cannot meet the SLOs with this pool."""
    reason_against: str


class CurvePoint(PlanRecord):
    slo_factor: float
    """Every SLO bound times this."""
    cost_per_hour: float | None


class PlanExplanation(PlanRecord):
    binding: list[BindingConstraint] = Field(default_factory=list)
    alternatives: list[PlanAlternative] = Field(default_factory=list)
    monolith: str = ""
    """When the monolith wins, and by how much it wins or loses here."""
    curve: list[CurvePoint] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class TimesCorrection(PlanRecord):
    """How much slower the replicas of a service are than their profile, by their engines' metrics."""

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
    """Factor on the profile's times of encoding and prefill; below 1: faster than the profile."""
    decode: float = 1.0
    """The same of decode iterations."""


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
    """Of a day, where the input has rates by hour."""
    latency_forecasts: list[LatencyForecast]
    caches: list[CacheSize] = Field(default_factory=list)
    reservations: list[QosReservation] = Field(default_factory=list)
    applications: list[PlannedApplication] = Field(default_factory=list)
    """Those with a tenant, a namespace or prompts."""
    store_flags: list[str] = Field(default_factory=list)
    """Of each host's store, beside those that follow from the plan."""
    listen: str | None = None
    """Address that servers listen at. None: every address of each host, or the address of the only host."""
    allow_anonymous: bool = False
    """Encoder services that other hosts reach ask no caller for a key."""
    router_ports: int = 0
    """Added to the routers' ports: `--apply` starts new routers beside the old ones."""
    proof: OptimalityProof
    explanation: PlanExplanation = PlanExplanation()
    corrections: list[TimesCorrection] = Field(default_factory=list)
    """Of profiles, that `cornplug replan` found; a re-plan from this plan goes by them."""
    input_digest: str
    """SHA-256 of the input file's bytes."""
    cornplug: str

    @classmethod
    def load(cls, path: Path) -> Self:
        """ConfigError: no plan, not one of this format, or edited into something that is none."""
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
            raise ConfigError(str(path), problem, "Write a new one with `cornplug plan`") from None

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")
