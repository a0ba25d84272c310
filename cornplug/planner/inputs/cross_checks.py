"""Checks of a plan's input that involve several tables or files, such as references to names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from cornplug.errors import ConfigError
from cornplug.planner.inputs import component_shapes, gpu_catalog, profile_tables, request_sampling
from cornplug.planner.inputs.field_types import InputError, Location, suggest_known_name
from cornplug.planner.inputs.llm_shape import text_config
from cornplug.planner.inputs.request_sampling import request_classes
from cornplug.planner.inputs.schema import (
    Application,
    Component,
    GpuSpec,
    Kind,
    MeasuredProfile,
    NodeClass,
    PlanInput,
    Profile,
    RequestSpec,
    Slo,
    ThroughputProfile,
)

_CURVE_KEYS: Final = (
    ("prefill_tokens", "prefill_s"),
    ("decode_requests", "decode_s"),
    ("encode_patches", "encode_s"),
    ("units", "unit_s"),
)
_SEPARATE_ENCODER: Final = frozenset({"E+PD", "E+P+D"})


def errors(plan_input: PlanInput) -> Iterator[InputError]:
    """Yield the errors that involve several tables, in no particular order. If two components have the same
    name, most checks are skipped."""
    components = plan_input.components_by_name
    yield from application_errors(plan_input)
    if len(components) < len(plan_input.components):
        return
    yield from duplicates(("pool",), [n.name for n in plan_input.pool])
    yield from duplicates(("gpus",), [g.name for g in plan_input.gpus])
    gpus = gpu_catalog.gpu_table(plan_input.gpus)
    yield from _machines(plan_input.pool, gpus, plan_input.prices)
    demands = list(request_classes(plan_input.applications))
    for i, component in enumerate(plan_input.components):
        place = ("components", i)
        yield from _component(place, component, components)
        for k, profile in enumerate(component.profiles):
            yield from _profile((*place, "profiles", k), profile, gpus, demands)
    yield from _check_pcp(plan_input)
    change = plan_input.change
    if change is not None and not change.plan.is_file():
        remedy = "Set the path of the running deployment's plan.json."
        yield InputError(("change", "plan"), f"file {change.plan} not found", remedy)


def application_errors(plan_input: PlanInput) -> Iterator[InputError]:
    """Yield errors for repeated names, and for applications that contradict other tables. `cornplug launch`
    also uses these checks. If two components have the same name, only this error is reported."""
    doubles = list(duplicates(("components",), [c.name for c in plan_input.components]))
    yield from doubles
    if doubles:
        return
    yield from duplicates(("applications",), [a.name for a in plan_input.applications])
    yield from duplicates(("qos",), [c.name for c in plan_input.qos])
    gpus = gpu_catalog.gpu_table(plan_input.gpus)
    for i, application in enumerate(plan_input.applications):
        yield from _application(("applications", i), application, plan_input.components_by_name, gpus)


def duplicates(location: Location, names: Sequence[str]) -> Iterator[InputError]:
    """Yield an error for each of the names that occurs earlier in the list. `location` is the list of tables
    whose names are in `names`."""
    for i, name in enumerate(names):
        if name in names[:i]:
            first = f"{location[-1]}[{names.index(name)}]"
            yield InputError(
                (*location, i, "name"), f"{name!r} is already the name of {first}", "Choose another name."
            )


def _machines(
    pool: Sequence[NodeClass], gpus: Mapping[str, GpuSpec], price_file: Path | None
) -> Iterator[InputError]:
    try:
        prices = gpu_catalog.price_table(price_file)
    except ConfigError as e:
        yield _to_input_error(("prices",), e)
        return
    for i, nodes in enumerate(pool):
        try:
            gpu_catalog.price_node_class(i, nodes, gpus, prices)
        except InputError as e:
            yield e


# Components ---------------------------------------------------------------------------------


def _component(
    location: Location, component: Component, components: Mapping[str, Component]
) -> Iterator[InputError]:
    if component.tower_of is not None:
        yield from _reference((*location, "tower_of"), component.tower_of, "llm", components)
    if component.speculative == "eagle3" and component.speculative_model is None:
        yield InputError(
            (*location, "speculative_model"), "missing, but EAGLE-3 needs it", "Set it to the draft model."
        )
    if component.server is not None and component.kind != "generator":
        remedy = "Remove it. The engine has its own command."
        yield InputError(
            (*location, "server"), f"not allowed in a component of kind {component.kind!r}", remedy
        )
    yield from _size(location, component, components)


def _size(
    location: Location, component: Component, components: Mapping[str, Component]
) -> Iterator[InputError]:
    if component.checkpoint is not None and not (component.checkpoint / "config.json").is_file():
        problem = f"no config.json in {component.checkpoint}"
        yield InputError((*location, "checkpoint"), problem, "Set it to a checkpoint's folder, or add shape.")
        return
    if component.shape is not None:
        return
    try:
        checkpoint = component_shapes.checkpoint_of(component, components)
    except ConfigError as e:
        key = e.field.removeprefix(f"components[{component.name}].")
        if key != e.field:  # an error in the checkpoint of `tower_of` is reported for that LLM
            yield _to_input_error((*location, key), e)
        return
    if checkpoint is None:
        if not all(_needs_no_shape(p, component.kind) for p in component.profiles):
            yield InputError(
                (*location, "shape"),
                f"the size of {component.name!r} is unknown, but its profile needs it",
                'Add shape, or checkpoint (a folder with config.json), or a profile of kind "throughput".',
            )
        return
    yield from _check_quantisation(location, component, checkpoint.config)
    if "index_topk" in text_config(checkpoint.config) and max(component.pcp) > 1:
        problem = "vLLM 0.32 runs models with sparse attention without CUDA graphs if pcp is set"
        yield InputError((*location, "pcp"), problem, "Remove it.")


def _check_pcp(plan_input: PlanInput) -> Iterator[InputError]:
    """Yield an error for each component that receives media and may use vLLM's prefill context parallelism,
    which vLLM's `PCPManager.validate_config` also rejects."""
    seeing = {a.llm for a in plan_input.applications if any(r.media for r in a.requests)}
    seeing |= {c.tower_of for c in plan_input.components if c.tower_of is not None}
    for i, component in enumerate(plan_input.components):
        if component.name in seeing and any(degree > 1 for degree in component.pcp):
            problem = f"{component.name!r} receives media, and vLLM supports pcp for text only"
            yield InputError(("components", i, "pcp"), problem, "Remove it.")


def _needs_no_shape(profile: Profile, kind: Kind) -> bool:
    """Return whether a component with this profile needs no shape. The profile of an LLM with measured times
    must also contain the size of the KV cache."""
    if isinstance(profile, MeasuredProfile) and kind == "llm":
        return profile.kv_tokens is not None or profile.file is not None
    return isinstance(profile, (ThroughputProfile, MeasuredProfile))


def _check_quantisation(
    location: Location, component: Component, config: dict[str, Any]
) -> Iterator[InputError]:
    """Yield an error if the checkpoint's weights are quantised, and the component lists another
    quantisation."""
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    if component.kind != "llm" or method not in ("awq", "gptq", "fp8"):
        return
    for key in ("quantisations", "prefill_quantisations", "decode_quantisations"):
        chosen = getattr(component, key)
        if chosen is not None and chosen != [method]:
            yield InputError(
                (*location, key),
                f"{chosen} for a checkpoint whose weights are {method}",
                f'Write {key} = ["{method}"].',
            )


def _profile(
    location: Location, profile: Profile, gpus: Collection[str], demands: Sequence[str]
) -> Iterator[InputError]:
    if profile.gpu is not None and profile.gpu not in gpus:
        remedy = f"{suggest_known_name(profile.gpu, list(gpus))} Or describe it in a [[gpus]] table."
        yield InputError((*location, "gpu"), f"no GPU {profile.gpu!r} in the table", remedy)
    if isinstance(profile, MeasuredProfile):
        yield from _curves(location, profile)
    if isinstance(profile, ThroughputProfile):
        rates = profile.requests_per_s if isinstance(profile.requests_per_s, dict) else {}
        for key, table in (("requests_per_s", rates), ("tpot_s", profile.tpot_s)):
            for name in table:
                if name not in demands:
                    problem = f'no request type "{name}"'
                    yield InputError((*location, key, name), problem, suggest_known_name(name, demands))


def _curves(location: Location, profile: MeasuredProfile) -> Iterator[InputError]:
    curves = [(x, y) for x, y in _CURVE_KEYS if getattr(profile, x) or getattr(profile, y)]
    if profile.file is not None:
        try:
            profile_tables.read(profile.file)
        except ConfigError as e:
            yield _to_input_error((*location, "file"), e)
    if profile.file is None and not curves:
        yield InputError(location, "no times", "Add file, or points such as prefill_tokens and prefill_s.")
    for x, y in curves:
        xs, ys = getattr(profile, x), getattr(profile, y)
        if len(xs) != len(ys):
            yield InputError((*location, y), f"{len(ys)} times for {len(xs)} {x}", "Write one time for each.")
        if any(b <= a for a, b in pairwise(xs)):
            yield InputError(
                (*location, x), f"{xs} is not ascending", "Write each point once, smallest first."
            )


# Applications -------------------------------------------------------------------------------


def _application(
    location: Location,
    application: Application,
    components: Mapping[str, Component],
    gpus: Mapping[str, GpuSpec],
) -> Iterator[InputError]:
    yield from _reference((*location, "llm"), application.llm, "llm", components)
    yield from duplicates((*location, "requests"), [r.name for r in application.requests])
    yield from _structures(location, application)
    for i, request in enumerate(application.requests):
        at = (*location, "requests", i)
        yield from _request(at, request, components)
        yield from _check_slowdowns(
            at if request.slo else location, request, request.slo or application.slo, gpus
        )
        if application.workload == "online" and request.job is not None:
            remedy = 'Write workload = "offline" for the application, or use rate instead of job.'
            yield InputError(
                (*at, "job"), f"{application.name} is online, so its requests cannot wait", remedy
            )
        if application.workload == "online" and not (request.slo or application.slo).has_bounds:
            yield InputError(
                (*at, "slo"),
                f"missing for the online request class {application.name}/{request.name}",
                'Write slo = { ttft_s = 1.0, tpot_s = 0.05 }, or workload = "offline" for the application.',
            )


def _structures(location: Location, application: Application) -> Iterator[InputError]:
    wanted = set(application.structures or ())
    location = (*location, "structures")
    if application.structures == []:
        yield InputError(location, "empty, so no structure is allowed", "Remove it to allow all structures.")
    if "+G" in wanted and not any(r.generates for r in application.requests):
        yield InputError(
            location, '"+G" is listed, but no request has generates', 'Remove "+G", or add generates.'
        )
    bases = wanted - {"+G"}
    if bases and bases <= _SEPARATE_ENCODER and not any(r.media for r in application.requests):
        remedy = 'Add "monolith" or "P+D", or [[applications.requests.media]].'
        yield InputError(location, "all structures have a separate encoder, but no request has media", remedy)


def _request(
    location: Location, request: RequestSpec, components: Mapping[str, Component]
) -> Iterator[InputError]:
    for i, media in enumerate(request.media):
        yield from _reference((*location, "media", i, "encoder"), media.encoder, "encoder", components)
    if request.generates is not None:
        at = (*location, "generates", "generator")
        yield from _reference(at, request.generates.generator, "generator", components)
    if request.trace is not None:
        try:
            request_sampling.read_trace(request.trace, request.trace_format)
        except ConfigError as e:
            yield _to_input_error((*location, "trace"), e)


def _check_slowdowns(
    location: Location, request: RequestSpec, slo: Slo, gpus: Mapping[str, GpuSpec]
) -> Iterator[InputError]:
    """Yield errors in the SLO's slowdowns and their reference replica. `location` is the table that contains
    `slo`."""
    if slo.idle is not None and slo.idle.gpu not in gpus:
        remedy = f"{suggest_known_name(slo.idle.gpu, list(gpus))} Or describe it in a [[gpus]] table."
        yield InputError((*location, "slo", "idle", "gpu"), f"no GPU {slo.idle.gpu!r} in the table", remedy)
    if slo.has_slowdowns and request.generates is not None:
        remedy = "Use bounds in seconds: ttft_s, tpot_s or e2e_s."
        yield InputError(
            (*location, "slo"), f"slowdowns are not supported for {request.name}, which has generates", remedy
        )


def _reference(
    location: Location, name: str, kind: Kind, components: Mapping[str, Component]
) -> Iterable[InputError]:
    found = components.get(name)
    if found is not None and found.kind == kind:
        return
    known = [c.name for c in components.values() if c.kind == kind]
    problem = (
        f"{name!r} is {_with_article(found.kind)}, not {_with_article(kind)}"
        if found
        else f"no component {name!r}"
    )
    yield InputError(location, problem, suggest_known_name(name, known))


def _with_article(kind: Kind) -> str:
    return f"a {kind}" if kind == "generator" else f"an {kind}"


def _to_input_error(location: Location, error: ConfigError) -> InputError:
    """Convert a ConfigError of another module to an InputError for the key that caused it."""
    text = str(error).removesuffix(f". {error.remedy}")
    if error.field.startswith("components["):
        text = text.removeprefix(f"{error.field}: ")
    return InputError(location, text, error.remedy)
