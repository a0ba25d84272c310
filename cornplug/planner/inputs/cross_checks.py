"""Checks across the tables of a plan's input: names that exist, files that are there, SLOs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from cornplug.errors import ConfigError
from cornplug.planner.inputs import component_shapes, gpu_catalog, profile_tables, traces
from cornplug.planner.inputs.input_error import InputError, Place, nearest
from cornplug.planner.inputs.llm_shape import text_config
from cornplug.planner.inputs.request_classes import request_classes
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

_CURVES: Final = (
    ("prefill_tokens", "prefill_s"),
    ("decode_requests", "decode_s"),
    ("encode_patches", "encode_s"),
    ("units", "unit_s"),
)
_SEPARATE_ENCODER: Final = frozenset({"E+PD", "E+P+D"})


def errors(plan_input: PlanInput) -> Iterator[InputError]:
    """All contradictions between tables, in no order; where components' names repeat, only those."""
    components = plan_input.component
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
    yield from _divided_prompts(plan_input)
    change = plan_input.change
    if change is not None and not change.plan.is_file():
        remedy = "Name the plan.json of the running deployment."
        yield InputError(("change", "plan"), f"no file {change.plan}", remedy)


def application_errors(plan_input: PlanInput) -> Iterator[InputError]:
    """Names that repeat, and applications that contradict other tables; a launch checks them, too."""
    doubles = list(duplicates(("components",), [c.name for c in plan_input.components]))
    yield from doubles
    if doubles:
        return
    yield from duplicates(("applications",), [a.name for a in plan_input.applications])
    yield from duplicates(("qos",), [c.name for c in plan_input.qos])
    gpus = gpu_catalog.gpu_table(plan_input.gpus)
    for i, application in enumerate(plan_input.applications):
        yield from _application(("applications", i), application, plan_input.component, gpus)


def duplicates(place: Place, names: Sequence[str]) -> Iterator[InputError]:
    """One error for each name of a list of tables that an earlier table has."""
    for i, name in enumerate(names):
        if name in names[:i]:
            first = f"{place[-1]}[{names.index(name)}]"
            yield InputError((*place, i, "name"), f"{name!r} is {first}'s name", "Choose another one.")


def _machines(
    pool: Sequence[NodeClass], gpus: Mapping[str, GpuSpec], price_file: Path | None
) -> Iterator[InputError]:
    try:
        prices = gpu_catalog.price_table(price_file)
    except ConfigError as e:
        yield _at(("prices",), e)
        return
    for i, nodes in enumerate(pool):
        try:
            gpu_catalog.priced(i, nodes, gpus, prices)
        except InputError as e:
            yield e


# Components ---------------------------------------------------------------------------------


def _component(
    place: Place, component: Component, components: Mapping[str, Component]
) -> Iterator[InputError]:
    if component.tower_of is not None:
        yield from _reference((*place, "tower_of"), component.tower_of, "llm", components)
    if component.speculative == "eagle3" and component.speculative_model is None:
        yield InputError(
            (*place, "speculative_model"), "missing, which EAGLE-3 needs", "Name the draft model."
        )
    if component.server is not None and component.kind != "generator":
        remedy = "Leave it out: its engine is started by the engine's own command."
        yield InputError((*place, "server"), f"on a component of kind {component.kind!r}", remedy)
    yield from _size(place, component, components)


def _size(place: Place, component: Component, components: Mapping[str, Component]) -> Iterator[InputError]:
    if component.checkpoint is not None and not (component.checkpoint / "config.json").is_file():
        problem = f"no config.json in {component.checkpoint}"
        yield InputError((*place, "checkpoint"), problem, "Name a checkpoint's folder, or give shape.")
        return
    if component.shape is not None:
        return
    try:
        checkpoint = component_shapes.checkpoint_of(component, components)
    except ConfigError as e:
        key = e.field.removeprefix(f"components[{component.name}].")
        if key != e.field:  # otherwise it is told of at the LLM whose tower this is
            yield _at((*place, key), e)
        return
    if checkpoint is None:
        if not all(_says_all(p, component.kind) for p in component.profiles):
            yield InputError(
                (*place, "shape"),
                f"the size of {component.name!r} is not known, which its profile needs",
                "Give shape, or checkpoint = a folder with config.json, or a profile of throughputs.",
            )
        return
    yield from _quantised(place, component, checkpoint.config)
    if "index_topk" in text_config(checkpoint.config) and max(component.pcp) > 1:
        problem = "the model attends to chosen tokens only, and vLLM 0.32 would run it without CUDA graphs"
        yield InputError((*place, "pcp"), problem, "Leave it out.")


def _divided_prompts(plan_input: PlanInput) -> Iterator[InputError]:
    """vLLM's prefill context parallelism takes no media: `PCPManager.validate_config`."""
    seeing = {a.llm for a in plan_input.applications if any(r.media for r in a.requests)}
    seeing |= {c.tower_of for c in plan_input.components if c.tower_of is not None}
    for i, component in enumerate(plan_input.components):
        if component.name in seeing and any(degree > 1 for degree in component.pcp):
            problem = f"{component.name!r} gets media, and vLLM divides prompts of text only"
            yield InputError(("components", i, "pcp"), problem, "Leave it out.")


def _says_all(profile: Profile, kind: Kind) -> bool:
    """Whether nothing else is asked of the model: of an LLM's times, how much KV cache there is."""
    if isinstance(profile, MeasuredProfile) and kind == "llm":
        return profile.kv_tokens is not None or profile.file is not None
    return isinstance(profile, (ThroughputProfile, MeasuredProfile))


def _quantised(place: Place, component: Component, config: dict[str, Any]) -> Iterator[InputError]:
    """A checkpoint that is quantised already cannot be served in another quantisation."""
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    if component.kind != "llm" or method not in ("awq", "gptq", "fp8"):
        return
    for key in ("quantisations", "prefill_quantisations", "decode_quantisations"):
        chosen = getattr(component, key)
        if chosen is not None and chosen != [method]:
            yield InputError(
                (*place, key),
                f"{chosen} for a checkpoint whose weights are {method}",
                f'Write {key} = ["{method}"].',
            )


def _profile(
    place: Place, profile: Profile, gpus: Collection[str], demands: Sequence[str]
) -> Iterator[InputError]:
    if profile.gpu is not None and profile.gpu not in gpus:
        remedy = f"{nearest(profile.gpu, list(gpus))} Or describe it in a [[gpus]] table."
        yield InputError((*place, "gpu"), f"no GPU {profile.gpu!r} in the table", remedy)
    if isinstance(profile, MeasuredProfile):
        yield from _curves(place, profile)
    if isinstance(profile, ThroughputProfile):
        rates = profile.requests_per_s if isinstance(profile.requests_per_s, dict) else {}
        for key, table in (("requests_per_s", rates), ("tpot_s", profile.tpot_s)):
            for name in table:
                if name not in demands:
                    problem = f'no request type "{name}"'
                    yield InputError((*place, key, name), problem, nearest(name, demands))


def _curves(place: Place, profile: MeasuredProfile) -> Iterator[InputError]:
    curves = [(x, y) for x, y in _CURVES if getattr(profile, x) or getattr(profile, y)]
    if profile.file is not None:
        try:
            profile_tables.read(profile.file)
        except ConfigError as e:
            yield _at((*place, "file"), e)
    if profile.file is None and not curves:
        yield InputError(place, "no times", "Give file, or points such as prefill_tokens and prefill_s.")
    for x, y in curves:
        xs, ys = getattr(profile, x), getattr(profile, y)
        if len(xs) != len(ys):
            yield InputError((*place, y), f"{len(ys)} times for {len(xs)} {x}", "Write one for each.")
        if any(b <= a for a, b in pairwise(xs)):
            yield InputError((*place, x), f"{xs} does not grow", "Write each point once, the smallest first.")


# Applications -------------------------------------------------------------------------------


def _application(
    place: Place,
    application: Application,
    components: Mapping[str, Component],
    gpus: Mapping[str, GpuSpec],
) -> Iterator[InputError]:
    yield from _reference((*place, "llm"), application.llm, "llm", components)
    yield from duplicates((*place, "requests"), [r.name for r in application.requests])
    yield from _structures(place, application)
    for i, request in enumerate(application.requests):
        at = (*place, "requests", i)
        yield from _request(at, request, components)
        yield from _idle(at if request.slo else place, request, request.slo or application.slo, gpus)
        if application.workload == "online" and request.job is not None:
            remedy = 'Write workload = "offline" for the application, or rate in place of job.'
            yield InputError((*at, "job"), f"{application.name} is online: its requests do not wait", remedy)
        if application.workload == "online" and not (request.slo or application.slo).bounded:
            yield InputError(
                (*at, "slo"),
                f"no bound on the times of {application.name}/{request.name}, which is online",
                'Write slo = { ttft_s = 1.0, tpot_s = 0.05 }, or workload = "offline" for the application.',
            )


def _structures(place: Place, application: Application) -> Iterator[InputError]:
    wanted = set(application.structures or ())
    place = (*place, "structures")
    if application.structures == []:
        yield InputError(place, "empty, so nothing may be planned for it", "Leave it out to allow all.")
    if "+G" in wanted and not any(r.generates for r in application.requests):
        yield InputError(place, '"+G", and no request has generates', 'Leave "+G" out, or add generates.')
    bases = wanted - {"+G"}
    if bases and bases <= _SEPARATE_ENCODER and not any(r.media for r in application.requests):
        remedy = 'Add "monolith" or "P+D", or [[applications.requests.media]].'
        yield InputError(place, "only with an encoder apart, and no request has media", remedy)


def _request(place: Place, request: RequestSpec, components: Mapping[str, Component]) -> Iterator[InputError]:
    for i, media in enumerate(request.media):
        yield from _reference((*place, "media", i, "encoder"), media.encoder, "encoder", components)
    if request.generates is not None:
        at = (*place, "generates", "generator")
        yield from _reference(at, request.generates.generator, "generator", components)
    if request.trace is not None:
        try:
            traces.read(request.trace, request.trace_format)
        except ConfigError as e:
            yield _at((*place, "trace"), e)


def _idle(place: Place, request: RequestSpec, slo: Slo, gpus: Mapping[str, GpuSpec]) -> Iterator[InputError]:
    """`place`: of the table whose `slo` it is."""
    if slo.idle is not None and slo.idle.gpu not in gpus:
        remedy = f"{nearest(slo.idle.gpu, list(gpus))} Or describe it in a [[gpus]] table."
        yield InputError((*place, "slo", "idle", "gpu"), f"no GPU {slo.idle.gpu!r} in the table", remedy)
    if slo.relative and request.generates is not None:
        remedy = "Bound its times in seconds: ttft_s, tpot_s or e2e_s."
        yield InputError((*place, "slo"), f"a slowdown of {request.name}, which has generates", remedy)


def _reference(
    place: Place, name: str, kind: Kind, components: Mapping[str, Component]
) -> Iterable[InputError]:
    found = components.get(name)
    if found is not None and found.kind == kind:
        return
    known = [c.name for c in components.values() if c.kind == kind]
    problem = f"{name!r} is {_a(found.kind)}, not {_a(kind)}" if found else f"no component {name!r}"
    yield InputError(place, problem, nearest(name, known))


def _a(kind: Kind) -> str:
    return f"a {kind}" if kind == "generator" else f"an {kind}"


def _at(place: Place, error: ConfigError) -> InputError:
    """Another module's error, at the key that led there."""
    text = str(error).removesuffix(f". {error.remedy}")
    if error.field.startswith("components["):
        text = text.removeprefix(f"{error.field}: ")
    return InputError(place, text, error.remedy)
