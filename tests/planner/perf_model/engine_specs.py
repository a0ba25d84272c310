"""Replicas for tests of the performance model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cornplug.planner.inputs.schema import GpuSpec
from cornplug.planner.perf_model.engine_spec import EngineSpec
from cornplug.planner.plan import Parallelism

_DEGREES = {degree.name for degree in fields(Parallelism)}


def engine_spec(gpu: GpuSpec, **given: Any) -> EngineSpec:
    """A vLLM engine on one GPU, changed by fields of EngineSpec and Parallelism."""
    degrees = {name: given.pop(name) for name in _DEGREES & given.keys()}
    fixed = {"engine": "vllm", "share": 1.0, "quantisation": "none", "chunk_tokens": 4096, "max_batch": 64}
    return EngineSpec(gpu, parallelism=Parallelism(**degrees), **{**fixed, **given})
