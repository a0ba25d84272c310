"""Schema of the planner's input: the tables and fields of a plan's TOML file.

Only shapes and ranges are checked here, and the fields of one table against each other; checks across
tables are in `cross_checks.py`. Reading the file, and finding the line of an error, is
`toml_reader.py`; the meaning of a length is `length_distributions.py`.
Times are seconds, rates requests per second, memory GiB (2**30) unless a name says otherwise;
a size may have a unit: "64GiB". A docstring
under a field is its description in `cornplug plan schema` and in docs/plan-input.md.
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
    """The application's part of the store: the settings `store.namespaces.NAME` of docs/configuration.md."""

    share: Share = 0.0
    """Fraction of the store that is guaranteed; others borrow the idle part of it."""
    ceiling: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Fraction of the store that is never exceeded."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Order in which namespaces keep room that no share guarantees, the highest longest."""
    ttl_s: Positive | None = None
    """Seconds from an entry's writing to its end. Left out: it has no end."""
    pinned: Flag = False
    """Entries stay until they are deleted or `ttl_s` ends them. Needs a ceiling below 1."""


class Route(InputTable):
    """The path of one request class through the components."""

    request: Name
    """A request class of the application."""
    path: list[Name] = Field(min_length=1)
    """Components in the order of the work: encoders, the LLM, the generator. Without an encoder the LLM's
    engine encodes by itself."""


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
    routes: list[Route] = Field(default_factory=list)
    """Paths of a launch from this file. A class without one takes every component that it names and that is
    launched. `cornplug plan` chooses paths by itself."""
    system_prompt: str | None = None
    """`cornplug launch` sends it to the LLM's engine before users come, so that its KV is in the store."""
    prefixes: list[str] = Field(default_factory=list)
    """Texts that follow the system prompt in many requests (documents, examples), sent in the same way."""
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")] | None = None
    """Its requests carry this `cache_salt` (routes.json says it): entries of different tenants are never
    shared."""
    namespace: AppNamespace | None = None
    """Its part of the store. Left out: it shares the namespace "default"."""


# The rest -----------------------------------------------------------------------------------


class CacheOptions(InputTable):
    """Sizes among which the plan chooses, GiB of a node's DRAM in the store; 0: none."""

    embedding_gib: list[Gib] = Field(default=[0.0])
    """Sizes of the cache of encoder outputs."""
    prefix_gib: list[Gib] = Field(default=[0.0])
    """Sizes of the cache for the KV of prompts."""


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


class ClassOfService(InputTable):
    """A class of service: the settings `qos.classes.NAME` of docs/configuration.md, but for keys."""

    name: Name
    """As `qos` of an application says it."""
    share: Share = 0.0
    """Fraction of the encoder service's time that is guaranteed."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Order of classes where no share decides, and of their requests in an engine: the highest first."""
    deadline_s: Positive | None = None
    """Of requests that name none. Engines refuse those that would be late."""


class LaunchOptions(InputTable):
    """The host of a launch from this file."""

    host: ListenHost = "127.0.0.1"
    """Address that engines, encoder services and routers listen at; "0.0.0.0": every address of the host. Its
    own processes and routes.json then use 127.0.0.1."""
    allow_anonymous: Flag = False
    """Encoder services that other hosts reach, as in a plan of several hosts, require no key. A launch of
    such a service needs this, on a private network, or keys (`CORNPLUG_ENCODER_REQUIRE_KEY`)."""
    port: Annotated[int, Field(ge=1, le=60000, strict=True)] = 8000
    """Of the first engine; further ones follow. Encoder services begin 750 above it."""
    store_gib: Gib | None = None
    """GiB of the host's store; 0: nothing is shared. Left out: a quarter of the memory that the host has left
    when the store starts."""
    store_flags: list[str] = Field(default_factory=list)
    """Further flags of the launched `cornplug serve-store`: `--far`, `--disk`, `--disk-size`, `--metrics`,
    `--quarantine-s`, `--clamp`. Other users of the host can read them: a far store's URL with a password is
    set as `CORNPLUG_STORE_FAR` of the launcher."""


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
    qos: list[ClassOfService] = Field(default_factory=list)
    """Classes of service, for `cornplug launch`; a plan computes its own."""
    launch: LaunchOptions = LaunchOptions()
    """Host and store, for `cornplug launch`."""

    @property
    def component(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}
