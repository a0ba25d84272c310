"""Schema of the planner's input: the tables and fields of a plan's TOML file, and their JSON schema.

The pydantic models validate the type and range of each field, and the fields of one table against each other.
`cross_checks.py` compares tables. `toml_reader.py` reads the file and finds the line of an error, and
`request_sampling.py` interprets lengths.

Times are in seconds, rates in requests per second and memory in GiB (2**30) unless a field's name has another
unit. A size may be text with a unit, such as "64GiB". The docstring under a field is the field's description
in `cornplug plan schema` and in docs/plan-input.md.

The JSON schema (draft 2020-12) is generated from the models. It covers keys, types, ranges, and rules on
several keys of a table. Names, files, prices and comparisons of two numbers are checked by `toml_reader.py`
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cornplug.planner.inputs.components import (
    SHAPES,
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
    NonNegativeInt,
    Positive,
    Quantisation,
    RouterPolicy,
    Share,
    Workload,
)
from cornplug.planner.inputs.gpu_catalog import GpuSpec, NodeClass
from cornplug.planner.inputs.llm_shape import LLMShape
from cornplug.planner.inputs.request_tables import (
    PercentileBounds,
    RampGeneration,
    RequestMedia,
    RequestSpec,
    SharedPrefix,
    Slo,
)

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
    "plan_schema",
]

# Applications -------------------------------------------------------------------------------


class AppNamespace(InputTable):
    """Namespace in the store. docs/configuration.md describes the fields as `store.namespaces.NAME`."""

    share: Share = 0.0
    """Guaranteed fraction of the store. Other namespaces may use the unused part."""
    ceiling: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Maximum fraction of the store."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Priority of entries beyond the guaranteed shares. Entries with the highest priority are evicted
    last."""
    ttl_s: Positive | None = None
    """Seconds after which an entry expires, by default never."""
    pinned: Flag = False
    """Keep entries until they are deleted or expire. Requires a ceiling below 1."""


class Route(InputTable):
    """Path of one request class through the components."""

    request: Name
    """Request class of the application."""
    path: list[Name] = Field(min_length=1)
    """Encoders, LLM and generator in this order. Without an encoder, the engine's own tower is used."""


class Application(InputTable):
    """Requests to one LLM, with their latency targets."""

    name: Name
    """Name of the application."""
    llm: Name
    """Component of kind "llm"."""
    workload: Workload = "online"
    """Online requests have latency targets, semi-online requests can wait for seconds, and offline requests
    can wait for hours."""
    qos: Name = "default"
    """Class of service of the requests."""
    slo: Slo = Slo()
    """Latency targets of request classes that have no `slo`."""
    structures: list[Structure] | None = None
    """Structures to choose from, by default all. "monolith" is one engine for all tasks. Otherwise, a "+"
    separates tasks that run in different processes: encode (E), prefill (P), decode (D) and generate (G).
    "+G" also allows a separate generator in the other structures."""
    requests: list[RequestSpec] = Field(min_length=1)
    """Request classes of the application."""
    routes: list[Route] = Field(default_factory=list)
    """Paths of request classes for `cornplug launch`. By default, a path contains all launched components
    that the class uses."""
    system_prompt: str | None = None
    """Prompt that `cornplug launch` prefills before users connect."""
    prefixes: list[str] = Field(default_factory=list)
    """Texts after the system prompt that `cornplug launch` also prefills, such as documents."""
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")] | None = None
    """`cache_salt` that clients must send. Different tenants share no entries."""
    namespace: AppNamespace | None = None
    """Namespace in the store, by default "default"."""


# Other tables -------------------------------------------------------------------------------


class CacheOptions(InputTable):
    """Store sizes to choose from, in GiB of a node's DRAM. 0 means no cache."""

    embedding_gib: list[Gib] = Field(default=[0.0])
    """GiB for encoder outputs."""
    prefix_gib: list[Gib] = Field(default=[0.0])
    """GiB for KV pages of prompts."""


class PlanRules(InputTable):
    """Objective of the plan, and the capacity that it keeps in reserve."""

    objective: Literal["cost", "goodput", "max-min"] = "cost"
    """Lowest price for all requests ("cost"), most weighted requests per second ("goodput"), or largest
    served fraction of every class ("max-min")."""
    max_utilisation: Share = 0.95
    """Maximum fraction of a replica's capacity for all requests."""
    online_share: Share = 0.8
    """Maximum fraction of a replica's capacity for online requests."""
    n_plus_one: Flag | Literal["node"] = True
    """Keep enough capacity for online requests after the loss of one replica of each service (true) or of any
    one node ("node")."""
    spot_share: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """Maximum fraction of each online request class on spot machines."""
    start_s: NonNegative = 60.0
    """Seconds that a replica needs to start, not counting the time to read its weights."""
    use_idle_gpus: Flag = True
    """Place extra replicas on GPUs of rented nodes that would otherwise be idle."""
    network_utilisation: Share = 0.7
    """Maximum fraction of the nodes' network bandwidth."""
    router: RouterPolicy = "power_of_two"
    """Policy of vllm-router and sglang-router."""
    split: Literal["fractional", "slices"] = "fractional"
    """Divide a request class among groups of replicas in any proportion, or in equal slices."""
    slices: Count = 1
    """Number of slices of a request class for `split = "slices"`."""
    colocate: Flag = True
    """Allow replicas that use a fraction of a GPU."""
    # The next two defaults are AIConfigurator's constants.
    disaggregation_efficiency_p: Share = 0.9
    """Fraction of a prefill engine's throughput that a P+D pair reaches."""
    disaggregation_efficiency_d: Share = 0.92
    """Fraction of a decode engine's throughput that a P+D pair reaches."""
    interference: Share = 0.1
    """Fraction by which other replicas on the same GPU slow down a replica."""
    simulate: Flag = True
    """Whether to simulate the plan. Otherwise, it is checked only with closed-form estimates."""
    seed: NonNegativeInt = 0
    """Seed of the samples and of the simulation."""


class SolverOptions(InputTable):
    """Limits of the search for a plan."""

    gap: NonNegative = 0.01
    """Stop when no plan can be better by more than this fraction."""
    work: Positive = 20.0
    """Maximum work of a solve, in millions of HiGHS steps times non-zero coefficients. This limit does not
    depend on the machine."""
    time_limit_s: Positive = 600.0
    """Seconds after which a solve stops even if `work` remains. The plan then depends on the machine."""
    threads: Count = 1
    """Threads of HiGHS. Another number may find another plan if a search stops at `work`."""


class ChangeRules(InputTable):
    """The running deployment, and limits on changing it."""

    plan: InputPath
    """plan.json of the running deployment."""
    horizon_hours: Positive = 24.0
    """Hours over which the cost of a change is spread."""
    max_changes: NonNegativeInt | None = None
    """Maximum number of starts and role switches, by default unlimited."""
    min_dwell_s: NonNegative = 900.0
    """Minimum seconds that a replica runs before it is stopped."""
    start_s: NonNegative = 300.0
    """Seconds from the start command until a replica serves requests."""
    role_switch: Flag = False
    """Whether SGLang's P and D replicas can change their role (transfer backend mooncake)."""
    role_switch_s: NonNegative = 30.0
    """Seconds of a role switch, during which the replica serves no requests."""
    gain: Annotated[float, Field(ge=1, strict=True)] = 1.2
    """Factor by which the savings must exceed the cost of the change."""


class ClassOfService(InputTable):
    """Class of service. docs/configuration.md describes the fields as `qos.classes.NAME`."""

    name: Name
    """Name of the class, to which `qos` of an application refers."""
    share: Share = 0.0
    """Guaranteed fraction of the encoder service's time."""
    priority: Annotated[int, Field(strict=True)] = 0
    """Priority of requests beyond the guaranteed share, and in engines. The highest priority is served
    first."""
    deadline_s: Positive | None = None
    """Deadline in seconds of requests that set no deadline. Engines reject requests that would miss their
    deadline."""


class LaunchOptions(InputTable):
    """Host settings for a launch from this file."""

    host: ListenHost = "127.0.0.1"
    """Address to listen on. "0.0.0.0" means all addresses."""
    allow_anonymous: Flag = False
    """Whether encoder services accept requests from other hosts without an API key. Set this only on a
    private network."""
    port: Annotated[int, Field(ge=1, le=60000, strict=True)] = 8000
    """Port of the first engine. The port of the first encoder service is 750 higher."""
    store_gib: Gib | None = None
    """Size of the store in GiB, by default a quarter of the free memory. With 0, nothing is shared."""
    store_flags: list[str] = Field(default_factory=list)
    """Extra flags of `cornplug serve-store`: `--far`, `--disk`, `--disk-size`, `--metrics`, `--quarantine-s`,
    `--clamp`. Other users can read flags, so set a URL with a password as `CORNPLUG_STORE_FAR`."""


class PlanInput(InputTable):
    """Input of `cornplug plan`."""

    name: Name = "plan"
    """Name of the plan."""
    components: list[Component] = Field(min_length=1)
    """Models, towers and generators."""
    applications: list[Application] = Field(min_length=1)
    """Applications with their load and latency targets."""
    pool: list[NodeClass] = Field(min_length=1)
    """Machines that you can rent or own."""
    gpus: list[GpuSpec] = Field(default_factory=list)
    """GPU types that extend or override cornplug's table."""
    prices: InputPath | None = None
    """File with a price table that replaces cornplug's table, in the same format."""
    caches: CacheOptions = CacheOptions()
    """Store sizes to choose from."""
    rules: PlanRules = PlanRules()
    """Objective, reserve capacity, and router policy."""
    solver: SolverOptions = SolverOptions()
    """Limits of the search."""
    change: ChangeRules | None = None
    """Running deployment, if the plan is a change of a running deployment."""
    qos: list[ClassOfService] = Field(default_factory=list)
    """Classes of service for `cornplug launch`. `cornplug plan` computes the classes instead."""
    launch: LaunchOptions = LaunchOptions()
    """Host and store settings for `cornplug launch`."""

    @property
    def components_by_name(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_BOUND_KEYS: Final = ("ttft_s", "tpot_s", "e2e_s", "ttft_slowdown", "tpot_slowdown", "e2e_slowdown")
_BOUNDS: Final = [{"required": [key]} for key in _BOUND_KEYS]
_SLOWDOWNS: Final = [{"required": [key]} for key in _BOUND_KEYS if key.endswith("slowdown")]
_HAS_BOUND: Final = {"anyOf": [*_BOUNDS, {"properties": {"also": {"minItems": 1}}, "required": ["also"]}]}
_HAS_SLO_BOUND: Final = {"properties": {"slo": _HAS_BOUND}, "required": ["slo"]}


def _if(condition: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {"if": condition, "then": then}


def _key_equals(key: str, value: str, *, default: bool = False) -> dict[str, Any]:
    """Return a schema that matches a table whose key has this value. With `default`, a table without the key
    also matches."""
    return {"properties": {key: {"const": value}}} | ({} if default else {"required": [key]})


_TABLE_RULES: Final[Mapping[str, list[dict[str, Any]]]] = {
    "Component": [
        *(
            _if(_key_equals("kind", kind), {"properties": {"shape": {"$ref": f"#/$defs/{shape.__name__}"}}})
            for kind, shape in SHAPES.items()
        ),
        {"if": _key_equals("kind", "encoder"), "else": {"properties": {"tower_of": False}}},
        _if(_key_equals("speculative", "eagle3"), {"required": ["speculative_model"]}),
    ],
    "RequestSpec": [
        {"oneOf": [{"required": [key]} for key in ("rate", "rate_by_hour", "job")]},
        {"properties": {"rate_by_hour": {"contains": {"exclusiveMinimum": 0}}}},
        {"dependentSchemas": {"trace": {"properties": {"prompt": False, "output": False}}}},
    ],
    "PercentileBounds": [{"anyOf": _BOUNDS}],
    "Slo": [
        _if(
            {
                "anyOf": [
                    *_SLOWDOWNS,
                    {"properties": {"also": {"contains": {"anyOf": _SLOWDOWNS}}}, "required": ["also"]},
                ]
            },
            {"required": ["idle"]},
        )
    ],
    "Application": [
        _if(
            _key_equals("workload", "online", default=True),
            {
                "properties": {"requests": {"items": {"properties": {"slo": _HAS_BOUND}}}},
                "anyOf": [_HAS_SLO_BOUND, {"properties": {"requests": {"items": _HAS_SLO_BOUND}}}],
            },
        ),
        _if(
            {"properties": {"structures": {"contains": {"const": "+G"}}}, "required": ["structures"]},
            {"properties": {"requests": {"contains": {"required": ["generates"]}}}},
        ),
        {"properties": {"structures": {"minItems": 1}}},
    ],
}
"""Rules on several keys of one table, by table. The same rules are in the table's validators and in
`cross_checks.py`."""


class _TomlSchema(GenerateJsonSchema):
    """Schema generator for TOML. TOML has no null, so the schema of an optional key does not allow null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default", 0) is None:
            del made["default"]
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        made = super().tagged_union_schema(schema)
        made.pop("discriminator", None)  # only OpenAPI uses it; each member has its own `kind`
        return made


def plan_schema(file: type[PlanInput] = PlanInput) -> dict[str, Any]:
    """Return the JSON schema of an input file, as data for `json.dumps`."""
    schema = file.model_json_schema(schema_generator=_TomlSchema)
    tables = cast(dict[str, dict[str, Any]], schema["$defs"])
    for name, rules in _TABLE_RULES.items():
        tables[name]["allOf"] = rules
    tables["RequestSpec"]["required"].remove("rate")  # may follow from `job` or `rate_by_hour`
    for table in tables.values():
        if table["properties"].get("kind", {}).get("const") in ("throughput", "table", "roofline"):
            table["required"] = ["kind", *table.get("required", ())]
    return {"$schema": DIALECT, **schema}
