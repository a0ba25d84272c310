"""Estimates of times from a model's shape and the GPU table, for components without measurements.

An iteration takes max(FLOP / (efficiency x peak), bytes / (efficiency x bandwidth)), plus its all-reduces, a
latency per layer and a constant overhead. Source: Williams, Waterman and Patterson 2009. The FLOP counts are
from Kaplan et al. 2020 (2 per weight and token), plus attention. A plan marks cells whose times are
estimates.

The efficiencies for Hopper and Blackwell are fitted to half of 577 published measurements of vLLM (Llama 70B,
MiniMax-M2.5, Qwen3-235B, Kimi-K2.5). `benchmarks/plan_vs_published.py` compares the estimates with the other
half. The efficiencies for Ampere, Ada, and 16-bit dense models are computed from kernel times of
AIConfigurator 0.12. They are reduced if the sums of these kernel times are known to be too short.

Pipeline parallelism: the time between two prefill iterations is the time of one stage
(`EngineStepTimes.pipeline` adds the other stages to the time to first token). In a decode iteration, all b
requests get a token, and b / pp requests pass through each stage. The iteration takes the time of pp stages
with b / pp requests.

Attention data parallelism (DeepSeek-AI 2024, "DeepSeek-V3", 3.4): dp groups of tp ranks compute in lockstep,
and each group has its own requests. Times are for a group if all groups have the same number of tokens. A
rank then has the same work as with tp alone, because experts process dp times the tokens on dp times the
ranks. Instead of a layer's second all-reduce, the tokens of all groups are gathered before the experts, and
the results are reduce-scattered after the experts, as both engines do without other libraries.

Decode context parallelism (DCP): each rank holds a part of every request's KV. In vLLM (0.32,
`dcp_comm_backend` "ag_rs"), a decode step gathers the queries of all ranks' heads, attends to the rank's own
part of the context, and reduce-scatters the outputs. With MLA, the prefill of a prompt's later chunks gathers
the latent vectors of the earlier chunks. With KV heads, it communicates like a decode step.

Prefill context parallelism (vLLM 0.32): pcp groups of tp ranks divide the tokens of each prompt, and each
group attends to the complete context for its tokens. Each group decodes 1 / pcp of the requests. Experts are
divided as with attention data parallelism. The KV of each layer is gathered from all groups, so that all
groups hold it.

Expert parallelism: a rank computes its own experts. With random routing, the fullest of G ranks has m +
sqrt(2 m ln G) of the tokens' choices, where m is the mean (Raab and Steger 1998, "Balls into bins").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, log2, sqrt
from typing import Final, NamedTuple

from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.component_shapes import ELEMENT_BYTES, kv_bytes_per_token
from cornplug.planner.inputs.schema import (
    Component,
    GeneratorShape,
    GpuSpec,
    LLMShape,
    RooflineProfile,
    TowerShape,
)
from cornplug.planner.perf_model.engine_spec import (
    EngineSpec,
    EngineStepTimes,
    GroupPrefill,
    PiecewiseCurve,
    in_group_s,
)

DRAFTS: Final = {"none": (0, 0), "mtp": (1, 1), "eagle3": (3, 2)}
"""(drafted tokens per iteration, layers that are computed per drafted token), by kind of speculation. MTP has
one layer. EAGLE-3 has one layer and an output head, which counts as a second layer."""

IMAGE_PATCHES: Final = 4096
"""Maximum number of patches in one image, which attend to each other. More patches are a batch of several
images."""
_DEFAULT_EFFICIENCY: Final = 0.5
"""Share of the peak FLOPS that towers and generators reach. This value was not compared with published
times."""
LAYER_S: Final = 40e-6
"""Time in seconds of a layer's sequential kernel launches, independent of the kernels' work."""
EXPERT_LAYER_EXTRA_S: Final = 45e-6
"""Additional time in seconds of a layer with experts, for routing, permutation and two grouped GEMMs."""


class LinkEfficiency(NamedTuple):
    """Efficiency of all-reduces between the GPUs of a node."""

    efficiency: float
    """Share of the link's peak bandwidth."""
    latency_s: float
    """Latency in seconds between two ranks. For n ranks, it is multiplied by log2(n)."""


class ComputeEfficiency(NamedTuple):
    """Shares of a GPU's peak FLOPS that engines reach."""

    dense: float
    dense_fp8: float
    experts: float
    """Share for mixtures of experts, whose grouped GEMMs are unevenly filled."""
    experts_fp8: float


NVLINK: Final = LinkEfficiency(0.6, 4.5e-6)
_PCIE: Final = LinkEfficiency(0.5, 15e-6)

_EFFICIENCY_OF_GENERATION: Final[Mapping[str, ComputeEfficiency]] = {
    "ampere": ComputeEfficiency(0.7, 0.7, 0.25, 0.25),
    "ada": ComputeEfficiency(0.52, 0.42, 0.2, 0.12),
    "hopper": ComputeEfficiency(0.68, 0.6, 0.19, 0.125),
    "blackwell": ComputeEfficiency(0.47, 0.35, 0.1, 0.09),
    "cpu": ComputeEfficiency(0.5, 0.5, 0.5, 0.5),
}


def compute_efficiency(gpu: GpuSpec, *, fp8: bool, experts: bool) -> float:
    """Return the share of a GPU's peak FLOPS at this precision that an engine reaches with long prompts."""
    of = _EFFICIENCY_OF_GENERATION[gpu.generation]
    if experts:
        return of.experts_fp8 if fp8 else of.experts
    return of.dense_fp8 if fp8 else of.dense


@dataclass(frozen=True)
class DevicePeaks:
    """Throughput of one rank's GPU per second, with the efficiencies of a profile."""

    flops: float
    bytes: float
    link: float
    all_reduce_s: float
    """Latency in seconds between two ranks. For n ranks, it is multiplied by log2(n)."""
    overhead_s: float

    @classmethod
    def from_gpu(
        cls,
        gpu: GpuSpec,
        profile: RooflineProfile,
        quantisation: str,
        efficiency: float = _DEFAULT_EFFICIENCY,
    ) -> DevicePeaks:
        """Return the peaks of a GPU for this quantisation.

        With 4-bit weights (awq, gptq), the GPU computes at its 16-bit peak, and with fp8 at its fp8 peak.
        `efficiency` is the share of the peak FLOPS if the profile does not set it.
        """
        peak = gpu.fp8_tflops if quantisation == "fp8" else gpu.bf16_tflops
        link = NVLINK if gpu.nvlink else _PCIE
        return cls(
            peak * 1e12 * (profile.compute_efficiency or efficiency),
            gpu.bandwidth_gb_s * 1e9 * profile.bandwidth_efficiency,
            gpu.link_gb_s * 1e9 * link.efficiency,
            link.latency_s,
            profile.step_overhead_s,
        )

    def seconds(self, flops: float, nbytes: float, sent: float = 0.0) -> float:
        """Return the time of one iteration in seconds, without the latencies of its layers."""
        return max(flops / self.flops, nbytes / self.bytes) + sent / self.link + self.overhead_s

    def latency_s(self, layers: float, tp: int, *, dp: int = 1, experts: bool = False) -> float:
        """Return the fixed latency of an iteration's layers in seconds.

        Each layer has sequential kernels and two all-reduces. The second all-reduce, after the experts,
        includes the ranks of all `dp` groups.
        """
        reduced = self.all_reduce_s * (log2(tp) + log2(tp * dp))
        each = LAYER_S + (EXPERT_LAYER_EXTRA_S if experts else 0.0) + reduced
        return layers * each


def llm_steps(
    component: Component, shape: LLMShape, profile: RooflineProfile, spec: EngineSpec
) -> EngineStepTimes:
    """Return the iteration times of a language model on one replica, or on each attention-DP group.

    The replica's share of the GPU is not taken into account. `component` determines speculation: with
    acceptance a and k drafted tokens, an iteration generates (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al.
    2023), and verifies k + 1 tokens per request.
    """
    at = spec.parallelism
    tp, pp, dp, dcp, pcp = at.tp, at.pp, at.dp, at.dcp, at.pcp
    gpu, quantisation, context_tokens = spec.gpu, spec.quantisation, spec.context_tokens
    experts = shape.active_parameters is not None
    efficiency = compute_efficiency(gpu, fp8=quantisation == "fp8", experts=experts)
    device = DevicePeaks.from_gpu(gpu, profile, quantisation, efficiency)
    groups = at.groups if experts else 1
    read = _weights_read(shape, quantisation, tp=tp, pp=pp, dp=groups)
    layers = shape.layers / pp
    latency_s = device.latency_s(layers, tp, dp=groups, experts=experts)
    gather_s = layers * device.all_reduce_s * log2(max(dcp, pcp))
    ranks = tp * groups if component.expert_parallel else 1

    def stage(tokens: float, attended: float) -> float:
        attention = 2 * layers * shape.heads * shape.head_dim * tokens * attended
        flops = 2 * _multiplied_weights(shape) * tokens / pp + attention
        if ranks > 1:
            flops += (
                2 * _routed_weights(shape) * _expert_imbalance(tokens * groups, shape, ranks) * tokens / pp
            )
        sent = _all_reduce_bytes(layers, shape.hidden, tokens, tp, groups)
        if pp > 1:
            sent += tokens * shape.hidden * ELEMENT_BYTES
        return device.seconds(flops / tp, read(tokens), sent) + latency_s

    def kv_gathered_s(tokens: float) -> float:
        return pcp_kv_bytes(shape, tokens, pp=pp, pcp=pcp) / device.link + gather_s

    def prefill(tokens: float) -> float:
        seconds = stage(tokens / pcp, tokens if context_tokens is None else context_tokens)
        if pcp > 1:
            seconds += kv_gathered_s(tokens)
        if dcp == 1 or context_tokens is None or context_tokens <= tokens:
            return seconds
        earlier = context_tokens - tokens
        sent = dcp_prefill_bytes(shape, tokens, earlier, layers=layers, tp=tp, pp=pp, dcp=dcp)
        return seconds + sent / device.link + gather_s

    drafted, draft_layers = DRAFTS[component.speculative if component.acceptance else "none"]
    tokens_out = sum(component.acceptance**i for i in range(drafted + 1))

    def decode(requests: float) -> float:
        each = max(requests / pp / pcp, 1.0)
        verify = pp * stage(each * (drafted + 1), 0.0)
        draft = drafted * draft_layers / shape.layers * pp * stage(each, 0.0)
        if dcp > 1:
            sent = dcp_attention_bytes(shape, each, layers=layers, tp=tp, dcp=dcp)
            verify += pp * (sent / device.link + gather_s)
        if pcp > 1:
            verify += pp * kv_gathered_s(each * pcp)
        return (verify + draft) / tokens_out

    def common(tokens: float) -> float:
        routed = _routed_weights(shape) * (
            1 + (_expert_imbalance(tokens * dp, shape, ranks) if ranks > 1 else 0.0)
        )
        sent = (
            _all_reduce_bytes(layers, shape.hidden, tokens, tp, dp)
            - _all_reduce_bytes(layers, shape.hidden, tokens, tp) / 2
        )
        return 2 * routed * tokens / tp / device.flops + sent / device.link

    curve = _fit_curve(prefill, spec.chunk_tokens + spec.max_batch)
    return EngineStepTimes(
        prefill=curve,
        decode=_fit_curve(decode, spec.max_batch),
        kv_token_s=component_shapes.kv_bytes_per_token(shape, tp=tp, pp=pp, dcp=dcp)
        / device.bytes
        / tokens_out
        / pcp,
        request_overhead_s=profile.request_overhead_s,
        pipeline=pp,
        group=_group_prefill(curve, common, dp) if dp > 1 else None,
    )


def encode(
    shape: TowerShape, gpu: GpuSpec, profile: RooflineProfile, *, tp: int, max_patches: int = 16384
) -> PiecewiseCurve:
    """Return the time to encode a batch, as a curve of seconds by number of patches.

    Towers use 16 bits and are divided among the TP ranks.
    """
    device = DevicePeaks.from_gpu(gpu, profile, "none")
    weights = component_shapes.weights_bytes(shape, "none", tp=tp)

    def batch(patches: float) -> float:
        attended = min(patches, IMAGE_PATCHES)
        flops = 2 * shape.parameters * patches + 4 * shape.layers * shape.hidden * patches * attended
        sent = _all_reduce_bytes(shape.layers, shape.hidden, patches, tp)
        return device.seconds(flops / tp, weights, sent) + device.latency_s(shape.layers, tp)

    return _fit_curve(batch, max_patches, extra=(IMAGE_PATCHES,))


def generate(
    shape: GeneratorShape, gpu: GpuSpec, profile: RooflineProfile, *, tp: int, quantisation: str
) -> PiecewiseCurve:
    """Return the time to generate a request's output, as a curve of seconds by number of units.

    The weights are read at least once.
    """
    device = DevicePeaks.from_gpu(gpu, profile, quantisation)
    weights = component_shapes.weights_bytes(shape, quantisation, tp=tp)
    return _fit_curve(lambda units: device.seconds(shape.flops_per_unit * units / tp, weights), 4096)


def _active(shape: LLMShape) -> float:
    return shape.active_parameters or shape.parameters


def _multiplied_weights(shape: LLMShape) -> float:
    """Return the number of weights by which a prompt token is multiplied.

    Embeddings are not included, because they are looked up, and the head is used only for few tokens.
    """
    return max(_active(shape) - shape.embedding_parameters, 0.0)


def _read_share(shape: LLMShape, tokens: float) -> float:
    """Return the share of the weights that an iteration reads: 1 - (1 - active share)^tokens.

    Tokens choose their experts independently.
    """
    idle: float = 1 - _active(shape) / shape.parameters
    return 1 - idle ** max(tokens, 1.0) if idle > 0 else 1.0


def _weights_read(
    shape: LLMShape, quantisation: str, *, tp: int, pp: int, dp: int
) -> Callable[[float], float]:
    """Return a function that maps the number of tokens of one group in an iteration to the bytes of weights
    that a rank reads.

    With attention data parallelism, a rank reads all non-expert weights, and the experts that are activated
    by a token of any group. The expected fraction of activated experts is 1 - (1 - k / E)^tokens.
    """
    weights = component_shapes.weights_bytes(shape, quantisation, tp=tp, pp=pp, dp=dp)
    if dp == 1 or shape.experts is None or shape.experts_per_token is None:
        return lambda tokens: weights * _read_share(shape, tokens)
    experts = component_shapes.expert_bytes(shape, quantisation, tp=tp, pp=pp, dp=dp)
    idle = 1 - shape.experts_per_token / shape.experts
    return lambda tokens: weights - experts * idle ** max(tokens * dp, 1.0)


def _group_prefill(prefill: PiecewiseCurve, common: Callable[[float], float], dp: int) -> GroupPrefill:
    shared = PiecewiseCurve.from_points((0.0, *prefill.x), (0.0, *map(common, prefill.x)))
    alone = [in_group_s(prefill, shared, x, x / dp) for x in prefill.x]
    return GroupPrefill(shared, PiecewiseCurve.from_points(prefill.x, alone))


def _routed_weights(shape: LLMShape) -> float:
    """Return the number of routed expert weights by which a token is multiplied, or 0 if this number is
    unknown."""
    if shape.experts is None or shape.experts_per_token is None:
        return 0.0
    return shape.expert_parameters * shape.experts_per_token / shape.experts


def _expert_imbalance(tokens: float, shape: LLMShape, ranks: int) -> float:
    """Return the excess of tokens on the fullest of `ranks` ranks over the mean, as a fraction of the
    mean."""
    mean = tokens * (shape.experts_per_token or 1) / ranks
    return min(sqrt(2 * log(ranks) / mean), ranks - 1)


def _all_reduce_bytes(layers: float, hidden: int, tokens: float, tp: int, dp: int = 1) -> float:
    """Return the number of bytes that a rank sends for two all-reduces in each layer.

    In a ring, a rank sends 2 (tp - 1) / tp of the data. The second all-reduce covers the tokens of all
    groups, on all tp * dp ranks.
    """
    if dp == 1:
        return 2 * layers * 2 * (tp - 1) / tp * hidden * tokens * ELEMENT_BYTES
    each = (tp - 1) / tp + (tp * dp - 1) / tp
    return layers * 2 * each * hidden * tokens * ELEMENT_BYTES


def _fit_curve(
    seconds: Callable[[float], float], largest: float, extra: tuple[float, ...] = ()
) -> PiecewiseCurve:
    """Return a piecewise linear curve through about a dozen points of `seconds`, at powers of two.

    The function is convex, and nearly linear between these points.
    """
    points = {float(largest), *(x for x in extra if x < largest)}
    x = 1.0
    while x < largest:
        points.add(x)
        x *= 2
    ordered = sorted(points | {2.0 * largest})
    return PiecewiseCurve.from_points(ordered, [seconds(x) for x in ordered])


def dcp_attention_bytes(shape: LLMShape, tokens: float, *, layers: float, tp: int, dcp: int) -> float:
    """Return the number of bytes that a rank sends for the queries and outputs of `tokens` tokens.

    With MLA, a head is as wide as the latent vector.
    """
    width = shape.mla_rank or shape.head_dim
    return layers * 2 * tokens * shape.heads / tp * width * (dcp - 1) * ELEMENT_BYTES


def dcp_prefill_bytes(
    shape: LLMShape, tokens: float, earlier: float, *, layers: float, tp: int, pp: int, dcp: int
) -> float:
    """Return the number of bytes that a rank sends for a prefill iteration of `tokens` tokens.

    `earlier` is the number of tokens of the same prompts in earlier iterations.
    """
    if earlier <= 0:
        return 0.0
    if shape.mla_rank is None:
        return dcp_attention_bytes(shape, tokens, layers=layers, tp=tp, dcp=dcp)
    return earlier * kv_bytes_per_token(shape, tp=tp, pp=pp) * (dcp - 1) / dcp


def pcp_kv_bytes(shape: LLMShape, tokens: float, *, pp: int, pcp: int) -> float:
    """Return the number of bytes that a rank sends so that all `pcp` groups hold the KV of `tokens` tokens.

    The latent vectors of MLA are not divided among the ranks of a group.
    """
    return tokens * kv_bytes_per_token(shape, pp=pp) * (pcp - 1) / pcp
