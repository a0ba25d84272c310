"""Replica configurations that can run a service: engine, nodes, TP, PP, DP, share, quantisation, chunk.

`cells.py` considers speed and memory. Impossible configurations are left out and counted by reason for the
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.schema import (
    Component,
    GpuSpec,
    LLMShape,
    NodeClass,
    PlanRules,
    Quantisation,
    Workload,
)

CHUNK_TOKENS: Final[dict[Workload, int]] = {"online": 4096, "semi-online": 8192, "offline": 16384}
"""Prompt tokens per iteration. Small chunks keep TPOT low, and large chunks increase throughput."""
MAX_BATCH: Final[dict[Workload, int]] = {"online": 256, "semi-online": 256, "offline": 1024}
TP_WITHOUT_NVLINK: Final = 2


@dataclass(frozen=True)
class ReplicaConfig:
    """Placement and settings of one replica."""

    engine: str
    """"vllm", "sglang", "cornplug" (the encoder service) or "external" (a generator's own server)."""
    nodes: NodeClass
    gpu: GpuSpec
    tp: int
    pp: int
    share: float
    quantisation: Quantisation
    workload: Workload
    """Workload that its chunk and batch are set for."""
    dp: int = 1
    """Number of attention-DP groups of `tp` GPUs, each with its own attention weights, requests and KV."""
    expert_parallel: bool = False
    dcp: int = 1
    """Number of GPUs of a group among which a request's KV is divided."""
    pcp: int = 1
    """Number of groups of `tp` GPUs that share the tokens of each prompt and decode different requests."""

    @property
    def gpus(self) -> float:
        return self.tp * self.pp * self.dp * self.pcp * self.share

    @property
    def ranks(self) -> int:
        """Number of processes of the replica, one per GPU."""
        return self.tp * self.pp * self.dp * self.pcp

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens per iteration and attention-DP group."""
        return CHUNK_TOKENS[self.workload]

    @property
    def max_batch(self) -> int:
        """Decoding requests per attention-DP group."""
        return MAX_BATCH[self.workload]

    @property
    def name(self) -> str:
        """Name of the configuration without the service. A replica keeps it when its role changes."""
        parallel = f"tp{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "")
        parallel += f"pcp{self.pcp}" if self.pcp > 1 else ""
        parallel += f"dcp{self.dcp}" if self.dcp > 1 else ""
        parallel += (f"dp{self.dp}" if self.dp > 1 else "") + ("ep" if self.expert_parallel else "")
        part = f"x{self.share:g}" if self.share < 1 else ""
        quantised = "" if self.quantisation == "none" else f":{self.quantisation}"
        return f"{self.nodes.name}:{self.engine}:{parallel}{part}{quantised}:{self.workload}"


def engines(service: Service) -> tuple[str, ...]:
    """Return the LLM's engines, cornplug's encoder service for a separate encoder, or "external" for a
    generator."""
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
    """Yield the configurations that can run `service` for these workloads, and count the others in
    `dropped`."""
    main = service.components[0]
    settings = workloads if service.llm else workloads[:1]
    choices = product(
        engines(service),
        nodes,
        _tensor_parallel(service),
        main.pp,
        main.dp,
        main.dcp,
        main.pcp,
        main.shares,
        main.quantisations_for(service.tasks),
        settings,
    )
    for engine, node, tp, pp, dp, dcp, pcp, share, quantisation, workload in choices:
        expert_parallel = main.expert_parallel and tp * dp * pcp > 1
        footprint = ReplicaConfig(
            engine, node, gpus[node.gpu], tp, pp, share, quantisation, workload, dp, expert_parallel, dcp, pcp
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
    if f.share < 1 and f.ranks > 1:
        return "a fraction of a GPU cannot have parallel ranks"
    if f.share < 1 and not rules.colocate:
        return "rules.colocate is off"
    if f.dp > 1 and f.tp * f.dp > f.nodes.gpus:
        return f"attention data parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if f.tp > f.nodes.gpus:
        return f"tensor parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if f.pcp > 1 and f.tp * f.pcp > f.nodes.gpus:
        return f"prefill context parallelism is limited to one node ({f.nodes.name} has {f.nodes.gpus} GPUs)"
    if f.tp * f.dp * f.pcp > TP_WITHOUT_NVLINK and not f.gpu.nvlink:
        return f"{f.gpu.name} has no NVLink, so tensor parallelism is limited to {TP_WITHOUT_NVLINK}"
    if f.gpus > f.nodes.gpus and f.gpus % f.nodes.gpus:
        return f"{f.ranks} GPUs do not fill whole nodes of {f.nodes.name}"
    if f.quantisation == "fp8" and not f.gpu.fp8_tflops:
        return f"{f.gpu.name} has no FP8 arithmetic"
    return None


def _reason_against_groups(f: ReplicaConfig, service: Service) -> str | None:
    """Return a reason against expert, attention data or context parallelism."""
    shape = service.components[0].shape
    if f.dp > 1 and f.pp > 1:
        return "attention data parallelism is not supported with pipeline parallelism"
    if f.dp > 1 and ("G" in service.tasks or not {"P", "D"} <= set(service.tasks)):
        return "attention data parallelism is supported only for engines that both prefill and decode"
    if f.dcp > 1 and (reason := _reason_against_dcp(f, service)):
        return reason
    if f.pcp > 1 and (reason := _reason_against_pcp(f, service)):
        return reason
    experts = shape.experts if isinstance(shape, LLMShape) else None
    if f.expert_parallel and experts and experts % (f.tp * f.dp * f.pcp):
        return f"{experts} experts cannot be distributed evenly to {f.tp * f.dp * f.pcp} GPUs"
    return None


def _reason_against_dcp(f: ReplicaConfig, service: Service) -> str | None:
    """Return a reason from vLLM's `ModelConfig.verify_with_parallel_config`, or that it is not planned."""
    main = service.components[0]
    if f.engine != "vllm" or "G" in service.tasks or not {"P", "D"} <= set(service.tasks):
        return "decode context parallelism is supported only for vLLM engines that both prefill and decode"
    if main.acceptance and main.speculative != "none":
        return "decode context parallelism is not supported with speculative decoding"
    if f.tp % f.dcp:
        return f"dcp must divide tp: {f.tp} GPUs cannot be divided into {f.dcp} parts"
    shape = main.shape
    if not isinstance(shape, LLMShape) or shape.mla_rank is not None:
        return None
    if f.dcp * shape.kv_heads > f.tp:
        return f"tp = {f.tp} repeats the KV of {shape.kv_heads} heads fewer than {f.dcp} times"
    if shape.heads // shape.kv_heads % f.dcp:
        return (
            f"the {shape.heads // shape.kv_heads} heads of each KV head cannot be divided among {f.dcp} ranks"
        )
    return None


def _reason_against_pcp(f: ReplicaConfig, service: Service) -> str | None:
    """Return a reason from vLLM's `PCPManager.validate_config`, or that it is not planned."""
    main = service.components[0]
    if f.engine != "vllm" or service.tasks != "PD":
        return (
            "prefill context parallelism is supported only for vLLM engines that both prefill and decode text"
        )
    if not isinstance(main.shape, LLMShape) or main.shape.mla_rank is None:
        return "vLLM supports prefill context parallelism only for models with latent attention (MLA)"
    if main.acceptance and main.speculative != "none":
        return "prefill context parallelism is not supported with speculative decoding"
    if f.pp > 1 or f.dp > 1 or f.dcp > 1:
        return "prefill context parallelism is not supported with pp, dp or dcp"
    return None
