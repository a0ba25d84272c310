"""Times and memory of a cell's replica, from the first profile of the component that matches the replica.

Times on a share of a GPU are divided by the share. The caller takes other replicas on the same GPU into
account (`rules.interference`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from cornplug.errors import ConfigError
from cornplug.planner.inputs import component_shapes, profile_tables
from cornplug.planner.inputs.schema import (
    Component,
    GeneratorShape,
    GpuSpec,
    LLMShape,
    MeasuredProfile,
    RooflineProfile,
    ThroughputProfile,
    TowerShape,
)
from cornplug.planner.perf_model import engine_spec, roofline
from cornplug.planner.perf_model.engine_spec import (
    ANY_CLASS,
    CellHardware,
    EngineSpec,
    EngineStepTimes,
    PiecewiseCurve,
)
from cornplug.planner.plan import Parallelism
from cornplug.settings import GIB

Shape = LLMShape | TowerShape | GeneratorShape
WEIGHTS_SHARE: Final = 0.9
"""Share of a GPU's memory that the weights of a separate tower or generator, which has no KV, may use."""


def hardware(
    component: Component,
    shape: Shape | None,
    spec: EngineSpec,
    *,
    role: str,
    tower: tuple[Component, TowerShape | None] | None = None,
    generator: tuple[Component, GeneratorShape | None] | None = None,
) -> CellHardware | None:
    """Return the times and memory of one replica, or None if no profile matches.

    With attention data parallelism, the times and memory are for one of the `dp` groups. Only rooflines
    support attention data parallelism and context parallelism, because tables and throughputs are measured
    without these kinds of parallelism.

    Args:
        component: LLM if the role contains P or D, otherwise the encoder or generator.
        shape: shape of the component. It may be None for throughputs and tables.
        role: tasks of the replica, letters of "EPDG".
        tower: tower that runs in the LLM's engine, with its shape.
        generator: generator that runs in the LLM's engine, with its shape.

    Raises ConfigError if a measured table cannot be read or has no rows for the cell.
    """
    for profile in component.profiles:
        if isinstance(profile, ThroughputProfile):
            found = _throughput(profile, spec, role)
        elif component.kind == "llm":
            found = _engine(profile, component, shape, spec, role, (tower, generator))
        else:
            found = _component_hardware(profile, component, shape, spec)
        if found is not None:
            return found
    return None


def _throughput(profile: ThroughputProfile, spec: EngineSpec, role: str) -> CellHardware | None:
    if not profile_matches(profile, spec, spec.quantisation) or profile.role not in (None, role):
        return None
    rates = profile.requests_per_s
    return CellHardware(
        requests_per_s={
            name: rate * spec.share
            for name, rate in (rates if isinstance(rates, dict) else {ANY_CLASS: rates}).items()
        },
        tpot_s=dict(profile.tpot_s),
        source=profile.source,
        measured=True,
    )


def _engine(
    profile: MeasuredProfile | RooflineProfile,
    component: Component,
    shape: Shape | None,
    spec: EngineSpec,
    role: str,
    extras: Iterable[tuple[Component, Shape | None] | None],
) -> CellHardware | None:
    """Return the times and memory of an LLM's engine, including a tower and a generator that run in it."""
    with_it = [part for part in extras if part is not None]
    whole = _llm(profile, component, shape, spec, role, _weights(with_it, spec.parallelism.tp))
    for part in with_it:
        if whole is None:
            return None
        whole = _merge_hardware(whole, _first_component_hardware(*part, spec))
    return whole


def _llm(
    profile: MeasuredProfile | RooflineProfile,
    component: Component,
    shape: Shape | None,
    spec: EngineSpec,
    role: str,
    extra_bytes: int,
) -> CellHardware | None:
    llm = shape if isinstance(shape, LLMShape) else None
    kv_tokens = None
    if isinstance(profile, RooflineProfile):
        if llm is None or not _roofline_applies(profile, spec.gpu, spec.quantisation):
            return None
        steps: EngineStepTimes | None = roofline.llm_steps(component, llm, profile, spec)
        source = _roofline_source(spec.gpu)
    else:
        if not profile_matches(profile, spec, spec.quantisation):
            return None
        profile = profile_tables.load_points(profile, spec.engine)
        steps, source = _measured_steps(profile, role), profile.source
        kv_tokens = profile.kv_tokens if spec.share == 1 else None
    if kv_tokens is None and llm is not None:
        kv_tokens = engine_spec.kv_tokens(llm, spec, extra_bytes=extra_bytes)
    if steps is None or kv_tokens is None:
        return None
    return CellHardware(
        steps=steps.scaled(1 / spec.share),
        kv_tokens=kv_tokens,
        source=source,
        measured=isinstance(profile, MeasuredProfile),
    )


def _measured_steps(profile: MeasuredProfile, role: str) -> EngineStepTimes | None:
    """Return the times in a measured table, or None if the table does not have all steps of the role.

    The returned times of steps outside the role are arbitrary, because they are not used.
    """
    prefill = _curve("prefill_tokens", profile.prefill_tokens, profile.prefill_s)
    decode = _curve("decode_requests", profile.decode_requests, profile.decode_s)
    if (prefill is None and "P" in role) or (decode is None and "D" in role):
        return None
    some = prefill or decode
    if some is None:
        return None
    return EngineStepTimes(
        prefill=prefill or some,
        decode=decode or some,
        kv_token_s=profile.kv_token_s,
        mixed_factor=profile.mixed_factor,
        request_overhead_s=profile.request_overhead_s,
        # The measured time of an iteration covers all pipeline stages.
        pipeline=1,
    )


def _component_hardware(
    profile: MeasuredProfile | RooflineProfile, component: Component, shape: Shape | None, spec: EngineSpec
) -> CellHardware | None:
    """Return the times of a tower or generator alone, without the language model in the same engine."""
    # In the engine of a quantised LLM, towers are not quantised, and generators are quantised only if they
    # support this quantisation.
    quantisation = spec.quantisation if spec.quantisation in component.quantisations else "none"
    if component.kind == "encoder":
        quantisation = "none"
    if isinstance(shape, TowerShape | GeneratorShape) and not _fits_memory(shape, quantisation, spec):
        return None
    if isinstance(profile, MeasuredProfile):
        if not profile_matches(
            profile, replace(spec, parallelism=Parallelism(spec.parallelism.tp, profile.pp)), quantisation
        ):
            return None
        profile = profile_tables.load_points(profile, spec.engine)
        encode = _curve("encode_patches", profile.encode_patches, profile.encode_s)
        generate = _curve("units", profile.units, profile.unit_s)
        source = profile.source
    elif not _roofline_applies(profile, spec.gpu, quantisation):
        return None
    else:
        encode, generate = _estimated_curves(profile, shape, spec, quantisation)
        source = _roofline_source(spec.gpu)
    curve = encode if component.kind == "encoder" else generate
    if curve is None:
        return None
    curve = curve.scaled(1 / spec.share)
    measured = isinstance(profile, MeasuredProfile)
    if component.kind == "encoder":
        return CellHardware(encode=curve, source=source, measured=measured)
    return CellHardware(generate=curve, source=source, measured=measured)


def _roofline_applies(profile: RooflineProfile, gpu: GpuSpec, quantisation: str) -> bool:
    """Return whether a roofline profile applies to this GPU, and the GPU supports the quantisation."""
    return profile.gpu in (None, gpu.name) and (quantisation != "fp8" or gpu.fp8_tflops > 0)


def _estimated_curves(
    profile: RooflineProfile, shape: Shape | None, spec: EngineSpec, quantisation: str
) -> tuple[PiecewiseCurve | None, PiecewiseCurve | None]:
    if isinstance(shape, TowerShape):
        return roofline.encode(shape, spec.gpu, profile, tp=spec.parallelism.tp), None
    if isinstance(shape, GeneratorShape):
        return None, roofline.generate(
            shape, spec.gpu, profile, tp=spec.parallelism.tp, quantisation=quantisation
        )
    return None, None


def _first_component_hardware(
    component: Component, shape: Shape | None, spec: EngineSpec
) -> CellHardware | None:
    for profile in component.profiles:
        if not isinstance(profile, ThroughputProfile):
            found = _component_hardware(profile, component, shape, spec)
            if found is not None:
                return found
    return None


def _merge_hardware(engine: CellHardware, part: CellHardware | None) -> CellHardware | None:
    if part is None:
        return None
    source = engine.source if part.source == engine.source else f"{engine.source}; {part.source}"
    return replace(
        engine,
        encode=part.encode or engine.encode,
        generate=part.generate or engine.generate,
        source=source,
        measured=engine.measured and part.measured,
    )


def profile_matches(
    profile: ThroughputProfile | MeasuredProfile, spec: EngineSpec, quantisation: str
) -> bool:
    """Return whether a profile matches the GPU, parallelism, quantisation and engine.

    A profile without an engine matches all engines.
    """
    measured_at = (profile.gpu, Parallelism(profile.tp, profile.pp), profile.quantisation)
    wanted = (spec.gpu.name, spec.parallelism, quantisation)
    return measured_at == wanted and profile.engine in (None, spec.engine)


def _fits_memory(shape: TowerShape | GeneratorShape, quantisation: str, spec: EngineSpec) -> bool:
    capacity_bytes = spec.gpu.memory_gib * GIB * spec.share * WEIGHTS_SHARE
    return component_shapes.weights_bytes(shape, quantisation, tp=spec.parallelism.tp) <= capacity_bytes


def _weights(parts: Iterable[tuple[Component, Shape | None]], tp: int) -> int:
    """Return the size in bytes of the weights of towers and generators on a rank, which reduce the KV
    cache."""
    return sum(
        component_shapes.weights_bytes(shape, "none", tp=tp) for _, shape in parts if shape is not None
    )


def _curve(name: str, x: list[int] | list[float], seconds: list[float]) -> PiecewiseCurve | None:
    if not x and not seconds:
        return None
    if len(x) != len(seconds) or list(x) != sorted(set(x)):
        problem = f"{len(x)} points with {len(seconds)} times, or not ascending"
        raise ConfigError(f"profiles.{name}", problem, "Write ascending points, with one time for each")
    return PiecewiseCurve.from_points(x, seconds)


def _roofline_source(gpu: GpuSpec) -> str:
    return f"roofline ({gpu.name}, {gpu.source})"
