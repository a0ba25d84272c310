"""Command line of `python -m sglang.launch_server` (0.5.23) for a deployment's engine."""

from __future__ import annotations

import math
from typing import Final

from cornplug.planner.launch import connections
from cornplug.planner.launch.connections import ReplicaAddress
from cornplug.planner.launch.engine_groups import QUEUE_MARGIN, STORE_SOCKET, GroupContext, is_cpu
from cornplug.planner.launch.vllm_flags import backend_of, settings_of
from cornplug.planner.plan import EngineSettings, ReplicaGroup

# Without TORCHDYNAMO_DISABLE, the first image would wait 16 s for the compiler.
_CPU_ENV: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_MAX_GRAPH_BATCH: Final = 512
_SHARED_GPU_MEM_FRACTION: Final = "0.9"


def argv(site: ReplicaAddress, context: GroupContext) -> list[str]:
    """Return the command line. Raises ConfigError if the group has no engine settings."""
    group = site.group
    return [
        "python", "-m", "sglang.launch_server", "--model-path", group.model,
        "--host", context.bind_address, "--port", str(site.port), "--enable-metrics",
        *_parallel(site),
        *_sizes(group, context),
        *_precision(group, context),
        *_attention(group, context),
        *_schedule(group, context),
        *_pair(site, context),
        *_encoding(group, context),
        *_sharing(context),
        *(group.flags or ()),
    ]  # fmt: skip


def env(site: ReplicaAddress, context: GroupContext) -> dict[str, str]:
    """Return environment variables for settings that have no flag."""
    group = site.group
    # Otherwise each health check would compute a token.
    found = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"} | context.sharing.env
    if is_cpu(group):
        found |= _CPU_ENV | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, site.devices))}
    else:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, site.devices))
    if context.pair_tp_differs and group.kv is not None:
        found |= connections.sglang_staging(group.kv, tp=group.tp, pp=group.pp)
    return found


def _parallel(site: ReplicaAddress) -> list[str]:
    """Return the flags for parallelism. SGLang's TP size includes the GPUs of all attention-DP groups."""
    group, flags = site.group, []
    tp = group.tp * group.dp
    if tp > 1:
        flags += ["--tp-size", str(tp)]
    if group.pp > 1:
        flags += ["--pp-size", str(group.pp)]
    if group.dp > 1:
        flags += ["--attn-dp-size", str(group.dp), "--load-balance-method", "total_requests"]
    if group.expert_parallel:
        flags += ["--ep-size", str(tp)]
    if site.ranks > 1:
        flags += ["--nnodes", str(site.ranks), "--node-rank", str(site.rank)]
        flags += ["--dist-init-addr", site.master]
    return flags


def _sizes(group: ReplicaGroup, context: GroupContext) -> list[str]:
    """Return the flags for the plan's settings, or [] for an apps file, which contains the flags itself."""
    if group.flags is not None:
        return []
    settings = settings_of(group)
    return [*_batches(group, settings, context), *_memory(group, settings), *_speculation(settings)]


def _batches(group: ReplicaGroup, settings: EngineSettings, context: GroupContext) -> list[str]:
    # Chunks consist of complete pages. cornplug's pages and transferred pages have at most 128 tokens.
    page = connections.MIN_PAGE_TOKENS
    # SGLang divides the chunk and the requests among the attention-DP groups.
    chunk = max(settings.chunk_tokens // page, 1) * page * group.dp
    flags = [
        "--context-length", str(settings.max_model_len),
        "--max-running-requests", str(settings.max_batch * group.dp),
        "--chunked-prefill-size", str(chunk),
    ]  # fmt: skip
    if not is_cpu(group) and context.role != "P":
        flags += ["--cuda-graph-max-bs-decode", str(min(settings.max_batch, _MAX_GRAPH_BATCH))]
    return flags


def _memory(group: ReplicaGroup, settings: EngineSettings) -> list[str]:
    """Return the flags for the size of the KV cache.

    SGLang's memory fraction refers to the free memory at startup. For an engine that shares its GPU, the size
    is therefore set in tokens.
    """
    tokens = ["--max-total-tokens", str(settings.kv_tokens)]
    if is_cpu(group):
        return [*tokens, "--mem-fraction-static", f"{settings.memory_share:.4g}"]
    if group.share < 1:
        return [*tokens, "--mem-fraction-static", _SHARED_GPU_MEM_FRACTION]
    return ["--mem-fraction-static", f"{settings.memory_share:.4g}"]


def _precision(group: ReplicaGroup, context: GroupContext) -> list[str]:
    """Return the flags for precision.

    AWQ and GPTQ need no flag, because the checkpoint declares them. A flag would prevent SGLang's faster
    kernels.
    """
    flags = ["--quantization", "fp8"] if group.quantisation == "fp8" else []
    if group.kv is not None and group.kv.element_bytes == 1:
        flags += ["--kv-cache-dtype", "fp8_e4m3"]
    if context.needs_common_dtype and group.quantisation in ("none", "fp8"):
        flags += ["--dtype", "bfloat16"]
    return flags


def _attention(group: ReplicaGroup, context: GroupContext) -> list[str]:
    if is_cpu(group):
        flags = ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
        return [*flags, "--mm-attention-backend", "sdpa"] if _encodes(group, context) else flags
    backend = backend_of(group, context.pair_gpus)
    flags = ["--attention-backend", backend] if backend else []
    if group.kv is not None and ((backend is not None and group.kv.mla) or context.role != "PD"):
        flags += ["--page-size", str(connections.page_tokens(group.kv))]
    return flags


def _speculation(settings: EngineSettings) -> list[str]:
    """Return the flags for speculative decoding. SGLang requires either all three numbers or none."""
    if settings.speculative == "none":
        return []
    tokens = settings.speculative_tokens
    flags = ["--speculative-algorithm", "NEXTN" if settings.speculative == "mtp" else "EAGLE3"]
    if settings.speculative_model:
        flags += ["--speculative-draft-model-path", settings.speculative_model]
    return [
        *flags, "--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(tokens + 1),
    ]  # fmt: skip


def _schedule(group: ReplicaGroup, context: GroupContext) -> list[str]:
    """Return the flags for scheduling.

    SGLang supports priorities only with "fcfs" and "lof". In a prefill-decode pair, the router limits the
    queue.
    """
    flags: list[str] = []
    if context.uses_priorities:
        # Use vLLM's order, so that a request's priority has the same meaning in both engines.
        flags += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        # Use vLLM's default for requests without a priority.
        flags += ["--default-priority-value", "0", "--retraction-policy", "priority"]
        flags += ["--schedule-policy", "fcfs"]
    elif context.role != "D" and group.workload != "offline":
        flags += ["--schedule-policy", "lpm" if group.workload == "online" else "hrrn"]
    if context.role == "PD" and group.workload == "semi-online":
        flags += ["--prefill-decode-interval", "4"]
    if group.workload == "offline":
        flags += ["--stream-interval", "10"]
        if context.role == "PD" and not _speculates(group):
            flags += ["--enable-mixed-chunk"]
    if context.limits_queue and context.role == "PD" and context.ttft_s is not None and group.capacity:
        simulated = QUEUE_MARGIN * group.queue.requests if group.queue else 0
        most = max(math.ceil(max(group.capacity.values()) / group.dp * context.ttft_s), simulated, 1)
        flags += ["--max-queued-requests", str(most)]
    return flags


def _pair(site: ReplicaAddress, context: GroupContext) -> list[str]:
    if context.role == "PD":
        return []
    backend = "mooncake" if context.transfer == "mooncake" else "nixl"
    flags = ["--disaggregation-mode", "prefill" if context.role == "P" else "decode"]
    flags += ["--disaggregation-transfer-backend", backend]
    if context.role == "P":
        flags += ["--disaggregation-bootstrap-port", str(site.bootstrap_port)]
    if _may_switch(site.group, backend):
        flags += ["--enable-pd-role-switch"]
    return flags


def _may_switch(group: ReplicaGroup, backend: str) -> bool:
    """Return whether SGLang can change this server's role at run time, which a later plan may require."""
    return backend == "mooncake" and group.pp == 1 and not _speculates(group)


def _speculates(group: ReplicaGroup) -> bool:
    return group.settings is not None and group.settings.speculative != "none"


def _encoding(group: ReplicaGroup, context: GroupContext) -> list[str]:
    if context.encoder_urls:
        return [
            "--language-only", "--encoder-urls", *context.encoder_urls,
            "--encoder-transfer-backend", "zmq_to_scheduler",
        ]  # fmt: skip
    if not _encodes(group, context):
        return []
    data = ["--mm-enable-dp-encoder"] if group.tp > 1 and group.workload == "offline" else []
    return ["--enable-multimodal", *data]


def _encodes(group: ReplicaGroup, context: GroupContext) -> bool:
    """Return whether the engine has a tower, for all media or for media that no service encodes in time."""
    return "E" in group.tasks or (bool(context.sharing.encoder.flags) and not context.encoder_urls)


def _sharing(context: GroupContext) -> list[str]:
    sharing = context.sharing
    if not sharing.is_enabled:
        return []
    flags = ["--enable-cornplug", "--cornplug-app", sharing.app, "--cornplug-store", STORE_SOCKET]
    return [*flags, *sharing.encoder.flags]
