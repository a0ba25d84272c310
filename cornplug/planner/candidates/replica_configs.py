"""Services that the applications need, and the replica configurations that can run them.

A service is a set of components with the tasks that each replica does: E (encode), P (prefill), D (decode)
and G (generate). Applications share a service if it has the same components. Encoders whose towers have the
same fingerprint count as the same component.

A replica configuration consists of engine, nodes, TP, PP, DP, share, quantisation and chunk. Speed and memory
are checked later (`cell_capacity.py`). Configurations that are not possible are omitted, and counted by
reason for the report. `engine_settings` and `kv_geometry` describe a configuration in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Final

from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.component_shapes import ELEMENT_BYTES
from cornplug.planner.inputs.request_sampling import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import (
    Component,
    GpuSpec,
    LLMShape,
    NodeClass,
    PlanRules,
    Quantisation,
    Structure,
    Workload,
)
from cornplug.planner.perf_model import engine_spec, roofline
from cornplug.planner.perf_model.engine_spec import CellHardware, EngineSpec
from cornplug.planner.plan import EngineSettings, KVGeometry, Parallelism

ALL_STRUCTURES: Final[tuple[Structure, ...]] = ("monolith", "E+PD", "P+D", "E+P+D", "+G")
CHUNK_TOKENS: Final[dict[Workload, int]] = {"online": 4096, "semi-online": 8192, "offline": 16384}
"""Number of prompt tokens per iteration, by workload. Small chunks keep TPOT low, and large chunks increase
throughput."""
MAX_BATCH: Final[dict[Workload, int]] = {"online": 256, "semi-online": 256, "offline": 1024}
TP_WITHOUT_NVLINK: Final = 2
PRIORITY: Final[dict[Workload, int]] = {"online": 2, "semi-online": 1, "offline": 0}


@dataclass(frozen=True)
class Service:
    tasks: str
    llm: Component | None = None
    towers: tuple[Component, ...] = ()
    generator: Component | None = None

    @property
    def components(self) -> tuple[Component, ...]:
        """Components of the service. The first component is the model on the command line."""
        first = (self.llm,) if self.llm else ()
        return first + self.towers + ((self.generator,) if self.generator else ())

    @property
    def name(self) -> str:
        return "+".join(c.name for c in self.components) + "/" + self.tasks

    def __hash__(self) -> int:
        return hash(self.name)

    def can_replace(self, other: Service) -> bool:
        """Return whether this service can do all tasks of `other`. It may have more towers, or a
        generator."""
        return (
            self.llm == other.llm
            and {t.name for t in self.towers} >= {t.name for t in other.towers}
            and other.generator in (None, self.generator)
            and set(self.tasks) - set("EG") == set(other.tasks) - set("EG")
        )


@dataclass(frozen=True)
class PathTemplate:
    """Services that a request visits, in order."""

    structure: str
    stages: tuple[Service, ...]


def canonical_encoders(components: Iterable[Component]) -> dict[str, Component]:
    """Map each encoder to the first encoder with the same fingerprint."""
    first: dict[str, Component] = {}
    encoders = [c for c in components if c.kind == "encoder"]
    return {c.name: first.setdefault(c.fingerprint or f"name:{c.name}", c) for c in encoders}


def paths(
    classes: Mapping[str, RequestClass], components: Sequence[Component]
) -> dict[str, tuple[PathTemplate, ...]]:
    """Return the paths of each request class.

    In addition to the class's own paths, these are paths through engines with towers for other classes'
    media. Such an engine may have the towers of all classes, so that one service is sufficient for all media.
    """
    encoders, by_name = canonical_encoders(components), {c.name: c for c in components}
    own = {name: tuple(_own_paths(c, by_name, encoders)) for name, c in classes.items()}
    known = tuple(
        dict.fromkeys(s for paths_of in own.values() for path in paths_of for s in path.stages if s.llm)
    )
    known = tuple(dict.fromkeys([*known, *_services_with_all_towers(known)]))
    return {
        name: tuple(dict.fromkeys(w for path in paths_of for w in _with_replacements(path, known)))
        for name, paths_of in own.items()
    }


def services(paths_of: Iterable[PathTemplate]) -> tuple[Service, ...]:
    return tuple(dict.fromkeys(s for path in paths_of for s in path.stages))


def _own_paths(
    request_class: RequestClass, components: Mapping[str, Component], encoders: Mapping[str, Component]
) -> list[PathTemplate]:
    listed = request_class.app.structures or ALL_STRUCTURES
    bases = [s for s in listed if s != "+G"] or ["monolith"]
    llm = components[request_class.app.llm]
    media = tuple(
        {encoders[m.encoder].name: encoders[m.encoder] for m in request_class.request.media}.values()
    )
    generator = (
        components[request_class.request.generates.generator] if request_class.request.generates else None
    )
    found: dict[tuple[Service, ...], PathTemplate] = {}
    for base in bases:
        for separate in _separate_generator_options(base, generator, listed):
            stages = _stages(base, llm, media, generator, separate=separate)
            name = _structure(base, media=bool(media), separate=separate)
            found.setdefault(stages, PathTemplate(name, stages))
    return list(found.values())


def _separate_generator_options(
    base: str, generator: Component | None, listed: Iterable[str]
) -> tuple[bool, ...]:
    """Return the allowed values of whether the generator is a separate service.

    The generator is always separate if prefill and decode are separate.
    """
    if generator is None:
        return (False,)
    if "P+D" in base:
        return (True,)
    if "+G" not in listed:
        return (False,)
    return (True,) if set(listed) == {"+G"} else (False, True)


def _structure(base: str, *, media: bool, separate: bool) -> str:
    if not media:
        base = {"E+PD": "monolith", "E+P+D": "P+D"}.get(base, base)
    return base + ("+G" if separate else "")


def _stages(
    base: str,
    llm: Component,
    media: tuple[Component, ...],
    generator: Component | None,
    *,
    separate: bool,
) -> tuple[Service, ...]:
    encoders_separate = base.startswith("E+")
    encoders = tuple(Service("E", towers=(t,)) for t in media) if encoders_separate else ()
    inside = () if encoders_separate else media
    e = "E" if inside else ""
    if "P+D" in base:
        engines: tuple[Service, ...] = (Service(e + "P", llm, inside), Service("D", llm))
    elif generator and not separate:
        engines = (Service(e + "PDG", llm, inside, generator),)
    else:
        engines = (Service(e + "PD", llm, inside),)
    last = (Service("G", generator=generator),) if generator and separate else ()
    return encoders + engines + last


def _services_with_all_towers(known: Sequence[Service]) -> list[Service]:
    """Return additional services whose engines load all towers: one service for each combination of language
    model and tasks, with the towers of all services in `known` with this combination."""
    towers: dict[tuple[str, str], dict[str, Component]] = {}
    for s in known:
        if s.llm and s.towers and s.generator is None:
            towers.setdefault((s.llm.name, s.tasks), {}).update({t.name: t for t in s.towers})
    llms = {s.llm.name: s.llm for s in known if s.llm}
    return [
        Service(tasks, llms[llm], tuple(of.values()))
        for (llm, tasks), of in towers.items()
        if not any(
            s.llm and (s.llm.name, s.tasks) == (llm, tasks) and {t.name for t in s.towers} == of.keys()
            for s in known
        )
    ]


def _with_replacements(path: PathTemplate, known: tuple[Service, ...]) -> list[PathTemplate]:
    """Return the path, and paths through engines with more towers instead of the path's own engine."""
    found = [path]
    if any(s.tasks == "E" for s in path.stages):
        return found
    for i, stage in enumerate(path.stages):
        if "P" not in stage.tasks:
            continue
        others = [s for s in known if s != stage and s.can_replace(stage)]
        if path.stages[-1].tasks == "G":
            others = [s for s in others if s.generator is None]
        found += [PathTemplate(path.structure, (*path.stages[:i], s, *path.stages[i + 1 :])) for s in others]
    return found


@dataclass(frozen=True)
class ReplicaConfig:
    """Placement and settings of one replica."""

    engine: str
    """"vllm", "sglang", "cornplug" (the encoder service) or "external" (a generator's own server)."""
    nodes: NodeClass
    gpu: GpuSpec
    parallelism: Parallelism
    share: float
    quantisation: Quantisation
    workload: Workload
    """Workload for which the chunk size and the batch size are chosen."""
    expert_parallel: bool = False

    @property
    def gpus(self) -> float:
        return self.parallelism.ranks * self.share

    @property
    def chunk_tokens(self) -> int:
        """Number of prompt tokens per iteration and attention-DP group."""
        return CHUNK_TOKENS[self.workload]

    @property
    def max_batch(self) -> int:
        """Maximum number of decoding requests per attention-DP group."""
        return MAX_BATCH[self.workload]

    def engine_spec(self, context_tokens: int | None = None) -> EngineSpec:
        """Return the configuration for the performance model, for prompts of `context_tokens` tokens."""
        return EngineSpec(
            self.gpu, self.engine, self.parallelism, self.share, self.quantisation, self.chunk_tokens,
            self.max_batch, context_tokens,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the configuration without the service. A replica keeps this name when its role changes."""
        at = self.parallelism
        parallel = f"tp{at.tp}" + (f"pp{at.pp}" if at.pp > 1 else "")
        parallel += f"pcp{at.pcp}" if at.pcp > 1 else ""
        parallel += f"dcp{at.dcp}" if at.dcp > 1 else ""
        parallel += (f"dp{at.dp}" if at.dp > 1 else "") + ("ep" if self.expert_parallel else "")
        part = f"x{self.share:g}" if self.share < 1 else ""
        quantised = "" if self.quantisation == "none" else f":{self.quantisation}"
        return f"{self.nodes.name}:{self.engine}:{parallel}{part}{quantised}:{self.workload}"


def engines(service: Service) -> tuple[str, ...]:
    """Return the names of the engines that can run a service.

    A separate encoder runs in cornplug's encoder service, and a separate generator in an "external" server.
    """
    if service.llm:
        return tuple(service.llm.engines)
    return ("cornplug",) if service.tasks == "E" else ("external",)


def footprints(
    service: Service,
    nodes: tuple[NodeClass, ...],
    gpus: Mapping[str, GpuSpec],
    rules: PlanRules,
    workloads: tuple[Workload, ...],
    dropped: Counter[str],
) -> Iterator[ReplicaConfig]:
    """Yield the configurations that can run `service` for these workloads.

    Configurations that are not possible are counted in `dropped`, by reason.
    """
    main = service.components[0]
    settings = workloads if service.llm else workloads[:1]
    degrees = product(_tensor_parallel(service), main.pp, main.dp, main.dcp, main.pcp)
    choices = product(
        engines(service),
        nodes,
        starmap(Parallelism, degrees),
        main.shares,
        main.quantisations_for(service.tasks),
        settings,
    )
    for engine, node, parallelism, share, quantisation, workload in choices:
        expert_parallel = main.expert_parallel and parallelism.expert_ranks > 1
        footprint = ReplicaConfig(
            engine, node, gpus[node.gpu], parallelism, share, quantisation, workload, expert_parallel
        )
        reason = _reason_against(footprint, rules) or _reason_against_groups(footprint, service)
        if reason:
            dropped[f"{service.name}: {reason}"] += 1
        else:
            yield footprint


def _tensor_parallel(service: Service) -> list[int]:
    main: Component = service.components[0]
    if service.tasks == "E":
        return [1]
    # Both engines refuse to start if heads cannot be divided evenly.
    heads = main.shape.heads if isinstance(main.shape, LLMShape) else 0
    return [tp for tp in main.tp if heads % tp == 0]


def _reason_against(f: ReplicaConfig, rules: PlanRules) -> str | None:
    at = f.parallelism
    if f.share < 1 and at.ranks > 1:
        return "a fraction of a GPU cannot have parallel ranks"
    if f.share < 1 and not rules.colocate:
        return "rules.colocate is off"
    if at.dp > 1 and at.tp * at.dp > f.nodes.gpus:
        return f"attention data parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if at.tp > f.nodes.gpus:
        return f"tensor parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if at.pcp > 1 and at.tp * at.pcp > f.nodes.gpus:
        return f"prefill context parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if at.expert_ranks > TP_WITHOUT_NVLINK and not f.gpu.nvlink:
        return f"{f.gpu.name} has no NVLink, so tensor parallelism is limited to {TP_WITHOUT_NVLINK}"
    if f.gpus > f.nodes.gpus and f.gpus % f.nodes.gpus:
        return f"{at.ranks} GPUs do not fill whole nodes of {f.nodes.name}"
    if f.quantisation == "fp8" and not f.gpu.fp8_tflops:
        return f"{f.gpu.name} has no FP8 arithmetic"
    return None


def _reason_against_groups(f: ReplicaConfig, service: Service) -> str | None:
    """Return the reason why a configuration's expert, attention data or context parallelism is not possible,
    or None if it is possible."""
    at = f.parallelism
    shape = service.components[0].shape
    if at.dp > 1 and at.pp > 1:
        return "attention data parallelism is not supported with pipeline parallelism"
    if at.dp > 1 and ("G" in service.tasks or not {"P", "D"} <= set(service.tasks)):
        return "attention data parallelism is supported only for engines that both prefill and decode"
    if at.dcp > 1 and (reason := _reason_against_dcp(f, service)):
        return reason
    if at.pcp > 1 and (reason := _reason_against_pcp(f, service)):
        return reason
    experts = shape.experts if isinstance(shape, LLMShape) else None
    if f.expert_parallel and experts and experts % at.expert_ranks:
        return f"{experts} experts cannot be distributed evenly to {at.expert_ranks} GPUs"
    return None


def _reason_against_dcp(f: ReplicaConfig, service: Service) -> str | None:
    """Return the reason why decode context parallelism is not possible or not planned, or None.

    Checks the conditions of vLLM's `ModelConfig.verify_with_parallel_config`.
    """
    at = f.parallelism
    main = service.components[0]
    if f.engine != "vllm" or "G" in service.tasks or not {"P", "D"} <= set(service.tasks):
        return "decode context parallelism is supported only for vLLM engines that both prefill and decode"
    if main.acceptance and main.speculative != "none":
        return "decode context parallelism is not supported with speculative decoding"
    if at.tp % at.dcp:
        return f"dcp must divide tp: {at.tp} GPUs cannot be divided into {at.dcp} parts"
    shape = main.shape
    if not isinstance(shape, LLMShape) or shape.mla_rank is not None:
        return None
    if at.dcp * shape.kv_heads > at.tp:
        return f"with tp = {at.tp}, fewer than {at.dcp} GPUs hold each of the {shape.kv_heads} KV heads"
    if shape.heads // shape.kv_heads % at.dcp:
        each = shape.heads // shape.kv_heads
        return f"the {each} heads of each KV head cannot be divided among {at.dcp} ranks"
    return None


def _reason_against_pcp(f: ReplicaConfig, service: Service) -> str | None:
    """Return the reason why prefill context parallelism is not possible or not planned, or None.

    Checks the conditions of vLLM's `PCPManager.validate_config`.
    """
    at = f.parallelism
    main = service.components[0]
    if f.engine != "vllm" or service.tasks != "PD":
        return (
            "prefill context parallelism is supported only for vLLM engines that both prefill and decode text"
        )
    if not isinstance(main.shape, LLMShape) or main.shape.mla_rank is None:
        return "vLLM supports prefill context parallelism only for models with latent attention (MLA)"
    if main.acceptance and main.speculative != "none":
        return "prefill context parallelism is not supported with speculative decoding"
    if at.pp > 1 or at.dp > 1 or at.dcp > 1:
        return "prefill context parallelism is not supported with pp, dp or dcp"
    return None


def engine_settings(
    service: Service, footprint: ReplicaConfig, shape: LLMShape, hardware: CellHardware
) -> EngineSettings:
    llm = service.llm
    assert llm is not None, "only engines have settings"
    at = footprint.parallelism
    kv_rank_bytes = component_shapes.kv_bytes_per_token(shape, tp=at.tp, pp=at.pp, dcp=at.dcp)
    speculates = llm.speculative if llm.acceptance else "none"
    context = llm.max_model_len or shape.max_context
    return EngineSettings(
        max_model_len=min(context, hardware.kv_tokens),
        max_batch=footprint.max_batch,
        chunk_tokens=footprint.chunk_tokens,
        kv_tokens=hardware.kv_tokens,
        kv_bytes=hardware.kv_tokens * kv_rank_bytes,
        memory_share=engine_spec.engine_share(footprint.engine_spec(), towers="E" in service.tasks),
        prefill_tokens_s=_prefill_tokens_s(service, footprint, hardware),
        weights_bytes=component_shapes.weights_bytes(
            shape, footprint.quantisation, tp=at.tp, pp=at.pp, dp=at.groups
        ),
        speculative=speculates,
        speculative_tokens=roofline.DRAFTS[speculates][0],
        speculative_model=llm.speculative_model if speculates != "none" else None,
        priority=PRIORITY[footprint.workload],
    )


def _prefill_tokens_s(service: Service, footprint: ReplicaConfig, hardware: CellHardware) -> float | None:
    if hardware.steps is None or "P" not in service.tasks:
        return None
    return footprint.chunk_tokens / hardware.steps.prefill(footprint.chunk_tokens)


def kv_geometry(shape: LLMShape, samples: Sequence[SampledRequest]) -> KVGeometry:
    """Return the model's KV geometry, with the length of the longest prompt in `samples`."""
    latent = shape.mla_rank is not None
    return KVGeometry(
        layers=shape.layers,
        kv_heads=1 if latent else shape.kv_heads,
        head_dim=shape.mla_rank or shape.head_dim,
        element_bytes=ELEMENT_BYTES,
        mla=latent,
        max_prompt_tokens=max(d.prompt_tokens for d in samples),
    )
