"""Determines an engine's planned settings, which become flags, and the geometry of the KV that it
transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.inputs.schema import LLMShape, Workload
from cornplug.planner.perf_model import kv_memory, roofline
from cornplug.planner.plan import EngineSettings, KVGeometry
from cornplug.planner.simulator.step_times import CellHardware

PRIORITY: Final[dict[Workload, int]] = {"online": 2, "semi-online": 1, "offline": 0}
ELEMENT_BYTES: Final = 2


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
        memory_share=kv_memory.engine_share(footprint.engine_spec(), towers="E" in service.tasks),
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
