"""Schema of the planner's input: the tables and fields of a plan's TOML file.

The pydantic models validate the type and range of each field, and the fields of one table against each other.
`cross_checks.py` compares tables. `toml_reader.py` reads the file and finds the line of an error, and
`length_distributions.py` interprets lengths.

Times are in seconds, rates in requests per second and memory in GiB (2**30) unless a field's name has another
unit. A size may be text with a unit, such as "64GiB". The docstring under a field is the field's description
in `cornplug plan schema` and in docs/plan-input.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cornplug.planner.inputs.components import (
    Component,
    ComponentResources,
    GeneratorShape,
    MeasuredProfile,
    Profile,
    RooflineProfile,
    ThroughputProfile,
    TowerShape,
)
from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    Flag,
    Gib,
    Histogram,
    InputPath,
    InputTable,
    Kind,
    Length,
    ListenHost,
    LogNormal,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    RouterPolicy,
    Share,
    Whole,
    Workload,
)
from cornplug.planner.inputs.gpu_catalog import GpuSpec, NodeClass
from cornplug.planner.inputs.llm_shape import LLMShape
from cornplug.planner.inputs.request_tables import RampGeneration, RequestMedia, RequestSpec, SharedPrefix
from cornplug.planner.inputs.slo import PercentileBounds, Slo

Structure = Literal["monolith", "E+PD", "P+D", "E+P+D", "+G"]

__all__ = [
    "AppNamespace",
    "Application",
    "CacheOptions",
    "ChangeRules",
    "ClassOfService",
    "Component",
    "ComponentResources",
    "Count",
    "Engine",
    "GeneratorShape",
    "GpuSpec",
    "Histogram",
    "InputTable",
    "Kind",
    "LLMShape",
    "LaunchOptions",
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
    "Route",
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


class AppNamespace(InputTable):
    """The application's namespace in the store: the settings `store.namespaces.NAME` of
    docs/configuration.md."""

    share: Share = 0.0
    """Fraction of the store that is guaranteed to this namespace. Other namespaces may borrow the part
    that is idle."""
    ceiling: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Largest fraction of the store that this namespace may use."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Eviction order for entries beyond the guaranteed shares. Namespaces with the highest priority are
    evicted last."""
    ttl_s: Positive | None = None
    """Seconds after which an entry expires. By default entries do not expire."""
    pinned: Flag = False
    """Keep entries until they are deleted or `ttl_s` expires. Requires a ceiling below 1."""


class Route(InputTable):
    """Path of one request class through the components."""

    request: Name
    """Name of a request class of the application."""
    path: list[Name] = Field(min_length=1)
    """Components in processing order: encoders, the LLM, the generator. If no encoder is listed, the LLM's
    engine runs its own tower."""


class Application(InputTable):
    """Requests to one LLM, with their latency targets."""

    name: Name
    """Name of the application in this file."""
    llm: Name
    """Name of a component of kind "llm"."""
    workload: Workload = "online"
    """Urgency of the requests. Online requests have latency targets, semi-online requests can wait for
    seconds, offline requests for hours."""
    qos: Name = "default"
    """Class of service that the encoder service and admission control use for these requests."""
    slo: Slo = Slo()
    """Latency targets of all request classes that do not set their own."""
    structures: list[Structure] | None = None
    """Structures that a plan may use, by default all. E, P and D are encode, prefill and decode on
    separate engines, and "+G" is a generator apart from the LLM."""
    requests: list[RequestSpec] = Field(min_length=1)
    """Request classes of the application."""
    routes: list[Route] = Field(default_factory=list)
    """Paths of request classes when `cornplug launch` starts this file; `cornplug plan` chooses paths
    itself. A class without a route uses every launched component that it names."""
    system_prompt: str | None = None
    """Prompt that `cornplug launch` sends to the LLM's engine before users connect, so that its KV is in
    the store."""
    prefixes: list[str] = Field(default_factory=list)
    """Texts that follow the system prompt in many requests, such as documents or examples. They are sent
    in the same way."""
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")] | None = None
    """`cache_salt` that clients must send with these requests; routes.json contains it. Entries of
    different tenants are never shared."""
    namespace: AppNamespace | None = None
    """Namespace of the application in the store. By default it uses the namespace "default"."""


# Other tables -------------------------------------------------------------------------------


class CacheOptions(InputTable):
    """Sizes of the store to choose from, in GiB of a node's DRAM. 0 means no cache."""

    embedding_gib: list[Gib] = Field(default=[0.0])
    """Sizes of the cache for encoder outputs."""
    prefix_gib: list[Gib] = Field(default=[0.0])
    """Sizes of the cache for KV pages of prompts."""


class PlanRules(InputTable):
    """Objective of the plan, and the capacity that it keeps in reserve."""

    objective: Literal["cost", "goodput", "max-min"] = "cost"
    """Goal of the plan. "cost": the lowest price that serves all requests; "goodput": the most weighted
    requests per second; "max-min": the largest fraction served of every request class."""
    max_utilisation: Share = 0.95
    """Largest fraction of a replica's capacity that all requests together may use."""
    online_share: Share = 0.8
    """Largest fraction of a replica's capacity that online requests may use. The rest is for requests that
    can wait."""
    n_plus_one: Flag | Literal["node"] = True
    """Keep enough capacity for online applications to survive the loss of one replica of each service.
    "node": the loss of any one node with all of its replicas."""
    spot_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """Largest fraction of each online request class that spot machines may serve. This fraction may stop
    at once."""
    start_s: NonNegative = 60.0
    """Seconds that a replica needs to start, not counting the time to read its weights. Used for
    `growth_per_minute` of requests."""
    use_idle_gpus: Flag = True
    """Fill idle GPUs of rented nodes with extra replicas. If false, these GPUs stay free for other work."""
    network_utilisation: Share = 0.7
    """Largest fraction of the nodes' network bandwidth that planned traffic may use."""
    router: RouterPolicy = "power_of_two"
    """Policy of vllm-router and sglang-router. Neither policy takes the size of a request into account."""
    split: Literal["fractional", "slices"] = "fractional"
    """How a request class is divided among groups of replicas: in any proportion, or in equal slices."""
    slices: Count = 1
    """Number of equal slices into which the rate of a request class is divided, for `split = "slices"`."""
    colocate: Flag = True
    """Allow replicas that use a fraction of a GPU."""
    disaggregation_efficiency_p: Share = 0.9
    """Fraction of a prefill engine's throughput that a P+D pair reaches. The default is AIConfigurator's
    constant."""
    disaggregation_efficiency_d: Share = 0.92
    """Fraction of a decode engine's throughput that a P+D pair reaches. The default is AIConfigurator's
    constant."""
    interference: Share = 0.1
    """Fraction of its speed that a replica loses to other replicas on the same GPU."""
    simulate: Flag = True
    """Confirm capacities and the whole plan by simulation. If false, only closed-form estimates are used."""
    seed: Whole = 0
    """Seed for sampled request lengths and for the simulation."""


class SolverOptions(InputTable):
    """Limits of the search for a plan."""

    gap: NonNegative = 0.01
    """Stop when no plan can be better by more than this fraction of the objective."""
    work: Positive = 20.0
    """Limit of a solve, in millions of HiGHS steps times non-zero coefficients; a core does 0.3 to 2.5
    million per second. The limit does not depend on the machine's speed, so the same input gives the same
    plan."""
    time_limit_s: Positive = 600.0
    """Seconds after which a solve stops even if `work` is not used up. The plan then depends on the
    machine, and reports that."""
    threads: Count = 1
    """Number of threads of the HiGHS solver. From HiGHS 1.16 on, a search that stops at `work` may find a
    different plan for a different number of threads."""


class ChangeRules(InputTable):
    """The current deployment, and how much a change of it may cost."""

    plan: InputPath
    """Path of the running deployment's plan.json."""
    horizon_hours: Positive = 24.0
    """Hours over which the cost of a change is spread."""
    max_changes: Whole | None = None
    """Maximum number of replica starts and role switches. By default unlimited."""
    min_dwell_s: NonNegative = 900.0
    """Minimum time in seconds that a replica runs before it is stopped."""
    start_s: NonNegative = 300.0
    """Seconds from the start command until a replica serves, including loading, graph capture and warm-up."""
    role_switch: Flag = False
    """SGLang's P and D replicas run with a transfer backend that can change their role (mooncake)."""
    role_switch_s: NonNegative = 30.0
    """Seconds that a role switch takes. The replica serves nothing during this time."""
    gain: Annotated[float, Field(ge=1, strict=True)] = 1.2
    """Factor by which the savings of a new plan must exceed the cost of switching to it."""


class ClassOfService(InputTable):
    """A class of service: the settings `qos.classes.NAME` of docs/configuration.md, except API keys."""

    name: Name
    """Name of the class, as used in `qos` of an application."""
    share: Share = 0.0
    """Fraction of the encoder service's time that is guaranteed to the class."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Priority of the class beyond the guaranteed shares, and of its requests in an engine. The highest is
    served first."""
    deadline_s: Positive | None = None
    """Deadline in seconds of requests that do not set one. Engines reject requests that would miss it."""


class LaunchOptions(InputTable):
    """Host settings for a launch from this file."""

    host: ListenHost = "127.0.0.1"
    """Address that engines, encoder services and routers listen on. With "0.0.0.0" they listen on all
    addresses, and local connections use 127.0.0.1."""
    allow_anonymous: Flag = False
    """Let encoder services that listen for other hosts accept requests without an API key. Use it only on
    a private network; otherwise require keys (`CORNPLUG_ENCODER_REQUIRE_KEY`)."""
    port: Annotated[int, Field(ge=1, le=60000, strict=True)] = 8000
    """Port of the first engine. The next engines use the following ports, and encoder services start 750
    above."""
    store_gib: Gib | None = None
    """Size of the host's store in GiB, 0 for no sharing. By default a quarter of the memory that is free
    when the store starts."""
    store_flags: list[str] = Field(default_factory=list)
    """Extra flags of `cornplug serve-store`: `--far`, `--disk`, `--disk-size`, `--metrics`,
    `--quarantine-s`, `--clamp`. Other users of the host can read flags, so set a far store's URL with a
    password as `CORNPLUG_STORE_FAR` instead."""


class PlanInput(InputTable):
    """Input of `cornplug plan`."""

    name: Name = "plan"
    """Name of the plan."""
    components: list[Component] = Field(min_length=1)
    """Models, towers and generators that applications use."""
    applications: list[Application] = Field(min_length=1)
    """Applications with their load and latency targets."""
    pool: list[NodeClass] = Field(min_length=1)
    """Machines that you can rent or own."""
    gpus: list[GpuSpec] = Field(default_factory=list)
    """GPU types to add to cornplug's table, or to replace in it."""
    prices: InputPath | None = None
    """Path of a price table that replaces cornplug's own, in the same format."""
    caches: CacheOptions = CacheOptions()
    """Store sizes to choose from."""
    rules: PlanRules = PlanRules()
    """Objective, reserve capacity, and router policy."""
    solver: SolverOptions = SolverOptions()
    """Limits of the search."""
    change: ChangeRules | None = None
    """The running deployment, for re-planning."""
    qos: list[ClassOfService] = Field(default_factory=list)
    """Classes of service for `cornplug launch`. A plan computes its own."""
    launch: LaunchOptions = LaunchOptions()
    """Host and store settings for `cornplug launch`."""

    @property
    def component(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}
