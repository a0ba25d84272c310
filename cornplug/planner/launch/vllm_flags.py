"""Command lines of `vllm serve` (0.32) and of `vllm-omni serve` (0.30) for a deployment.

The attention backends for models with latent attention (MLA) are the engines' own preferences by GPU
generation, in `vllm/platforms/cuda.py` (0.32) and `sglang/srt/arg_groups/overrides.py` (0.5.23). For all
other models, the engine chooses the backend. The flags of vLLM-Omni are in
`vllm_omni/entrypoints/cli/serve.py`, which extends the parser of `vllm serve`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from cornplug.errors import ConfigError
from cornplug.planner.inputs.field_types import GeneratorServer
from cornplug.planner.launch import connections
from cornplug.planner.launch.connections import ReplicaAddress
from cornplug.planner.launch.engine_groups import (
    QUEUE_MARGIN,
    STORE_SOCKET,
    GroupContext,
    StoreSharing,
    is_cpu,
)
from cornplug.planner.plan import EngineSettings, PlannedGroup, ReplicaGroup

_CPU_ENV: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_Generation = Literal["ampere", "ada", "hopper", "blackwell", "cpu"]
_GENERATIONS: Final[tuple[tuple[str, _Generation], ...]] = (
    (r"\bG?B[123]0\d", "blackwell"),
    (r"\bG?H(20|100|200|800)", "hopper"),
    (r"\bL(4|20|40)", "ada"),
    (r"\bA(10|30|40|100|800)", "ampere"),
    (r"^cpu", "cpu"),
)
_MLA_BACKENDS: Final[dict[_Generation, dict[str, str]]] = {
    "hopper": {"vllm": "FLASHMLA", "sglang": "flashmla"},
    "blackwell": {"vllm": "FLASHINFER_MLA", "sglang": "trtllm_mla"},
    "ada": {"vllm": "TRITON_MLA", "sglang": "triton"},
    "ampere": {"vllm": "TRITON_MLA", "sglang": "triton"},
}


def argv(site: ReplicaAddress, context: GroupContext) -> list[str]:
    """Return the command line. Raises ConfigError if the group has no engine settings."""
    group = site.group
    return [
        "vllm", "serve", group.model, "--host", context.bind_address, "--port", str(site.port),
        *_parallel(site),
        *_sizes(group),
        *_precision(group, context),
        *_attention(group, context),
        *_workload_flags(group),
        *_admission(group, context),
        *_connectors(group, context),
        "--shutdown-timeout", str(context.drain_s),
        *(group.flags or ()),
    ]  # fmt: skip


def env(site: ReplicaAddress, context: GroupContext) -> dict[str, str]:
    """Return environment variables for settings that have no flag."""
    found = dict(context.sharing.env)
    if is_cpu(site.group):
        found |= _CPU_ENV | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, site.devices))}
    else:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, site.devices))
    if context.role != "PD" and context.transfer == "nixl":
        found |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": site.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(site.side_port),
        }
    if context.role == "P" and context.transfer == "mooncake":
        found["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(site.bootstrap_port)
    if context.role != "PD" and context.transfer == "lmcache":
        # LMCache's keys are Python hashes, which must be the same on both sides.
        found["PYTHONHASHSEED"] = "0"
    if context.needs_admission:
        found["CORNPLUG_CONFIG"] = "${PLAN_DIR}/qos.toml"
    return found


def _sizes(group: ReplicaGroup) -> list[str]:
    """Return the flags for the plan's settings. An apps file contains the flags itself."""
    if group.flags is not None:
        return ["--enforce-eager"] if is_cpu(group) else []
    settings = settings_of(group)
    return [*_batches(group, settings), *_memory(group, settings), *_speculation(settings)]


def settings_of(group: ReplicaGroup) -> EngineSettings:
    """Return the engine settings that a plan contains for a language model's group.

    Raises ConfigError if the group has no settings, because it was planned from a throughput or the plan was
    edited.
    """
    if group.settings is not None:
        return group.settings
    field = f"groups[{group.name!r}].settings"
    if isinstance(group, PlannedGroup) and group.profile.startswith("throughput"):
        raise ConfigError(
            field,
            f"{group.components[0]} was planned from a throughput, without batch, chunk or KV size",
            'Add a checkpoint or shape, and a profile of kind "table" (`cornplug profile llm`).',
        )
    raise ConfigError(
        field, "missing, so the engine's command cannot be written", "Run `cornplug plan` again."
    )


def _parallel(site: ReplicaAddress) -> list[str]:
    group = site.group
    flags = []
    if group.tp > 1:
        flags += ["--tensor-parallel-size", str(group.tp)]
    if group.pp > 1:
        flags += ["--pipeline-parallel-size", str(group.pp)]
    if group.dp > 1:
        # One server has all groups, and sends each request to the least busy group.
        flags += ["--data-parallel-size", str(group.dp)]
    if group.pcp > 1:
        flags += ["--prefill-context-parallel-size", str(group.pcp)]
    if group.dcp > 1:
        flags += ["--decode-context-parallel-size", str(group.dcp)]
    if group.expert_parallel:
        flags += ["--enable-expert-parallel"]
    if site.ranks > 1:
        address, _, port = site.master.rpartition(":")
        flags += ["--nnodes", str(site.ranks), "--node-rank", str(site.rank)]
        flags += ["--master-addr", address, "--master-port", port]
        flags += ["--headless"] if site.rank else []
    return flags


def _batches(group: ReplicaGroup, settings: EngineSettings) -> list[str]:
    # vLLM requires at least as many tokens per iteration as requests.
    tokens = max(settings.chunk_tokens, settings.max_batch)
    return [
        "--max-model-len", str(settings.max_model_len),
        "--max-num-seqs", str(settings.max_batch),
        "--max-num-batched-tokens", str(tokens),
        *(["--enforce-eager"] if is_cpu(group) else []),
    ]  # fmt: skip


def _memory(group: ReplicaGroup, settings: EngineSettings) -> list[str]:
    """Return the flags for the size of the KV cache.

    If the engine shares its GPU, the size is set in bytes, because the free memory depends on the start
    order. vLLM also checks the memory share at startup.
    """
    exact = ["--kv-cache-memory-bytes", str(settings.kv_bytes)]
    if is_cpu(group):
        return exact
    share = ["--gpu-memory-utilization", f"{settings.memory_share:.4g}"]
    return [*share, *exact] if group.share < 1 else share


def _precision(group: ReplicaGroup, context: GroupContext) -> list[str]:
    """Return the flags for precision.

    AWQ and GPTQ need no flag, because the checkpoint declares them. A flag would prevent vLLM's faster
    kernels.
    """
    flags = ["--quantization", "fp8"] if group.quantisation == "fp8" else []
    if group.kv is not None and group.kv.element_bytes == 1:
        flags += ["--kv-cache-dtype", "fp8"]
    if context.needs_common_dtype and group.quantisation in ("none", "fp8"):
        # Use the encoder service's dtype, because embeddings and KV in another dtype would differ.
        flags += ["--dtype", "bfloat16"]
    return flags


def _attention(group: ReplicaGroup, context: GroupContext) -> list[str]:
    backend = backend_of(group, context.pair_gpus)
    flags = ["--attention-backend", backend] if backend else []
    if group.kv is not None and (group.kv.mla or context.role != "PD"):
        flags += ["--block-size", str(connections.page_tokens(group.kv))]
    return flags


def _speculation(settings: EngineSettings) -> list[str]:
    if settings.speculative == "mtp":
        how = {"method": "mtp", "num_speculative_tokens": settings.speculative_tokens}
        return ["--speculative-config", json.dumps(how)]
    if settings.speculative == "eagle3":
        return [
            "--spec-method", "eagle3", "--spec-model", settings.speculative_model or "",
            "--spec-tokens", str(settings.speculative_tokens),
        ]  # fmt: skip
    return []


def _workload_flags(group: ReplicaGroup) -> list[str]:
    if group.workload == "offline":
        encoder = ["--mm-encoder-tp-mode", "data"] if "E" in group.tasks and group.tp > 1 else []
        return ["--performance-mode", "throughput", "--stream-interval", "10", *encoder]
    return ["--performance-mode", "interactivity"] if group.workload == "online" else []


def _admission(group: ReplicaGroup, context: GroupContext) -> list[str]:
    """Return the flags for admission control.

    vLLM serves requests with lower priorities first, and SGLang's flags set the same order.
    """
    flags = ["--scheduling-policy", "priority"] if context.uses_priorities else []
    settings = group.settings
    rate = settings.prefill_tokens_s if settings else None
    if context.limits_queue and context.role != "D" and context.ttft_s is not None and settings and rate:
        # The limit is for all attention-DP groups, because the server counts tokens before it divides
        # requests among the groups.
        simulated = QUEUE_MARGIN * group.queue.prompt_tokens * group.dp if group.queue else 0
        most = max(math.ceil(context.ttft_s * rate * group.dp), settings.max_model_len, simulated)
        flags += ["--max-num-queued-tokens", str(most)]
    if context.needs_admission:
        flags += ["--middleware", "cornplug.vllm_connector.admission.Admission"]
    return flags


def _connectors(group: ReplicaGroup, context: GroupContext) -> list[str]:
    sharing = context.sharing
    if context.role == "PD":
        return [
            *_short_connector_flags(sharing),
            *(["--cornplug-tower", "service"] if context.encoder_urls else []),
        ]
    connectors = [connections.vllm_config(context.role, context.transfer)]
    if sharing.kv:
        connectors.append(_cornplug_connector(context, "kv_connector", "CornplugConnector"))
    flags = ["--kv-transfer-config", json.dumps(connections.combine_vllm_connectors(*connectors))]
    if sharing.embeddings:
        flags += [
            "--ec-transfer-config",
            json.dumps(_cornplug_connector(context, "ec_connector", "CornplugECConnector")),
        ]
    return flags


def _short_connector_flags(sharing: StoreSharing) -> list[str]:
    if not sharing.is_enabled:
        return []
    flags = ["--kv-connector", "cornplug", "--cornplug-app", sharing.app, "--cornplug-store", STORE_SOCKET]
    return [*flags, *sharing.encoder.flags]


def _cornplug_connector(context: GroupContext, key: str, name: str) -> dict[str, Any]:
    """Return the configuration of cornplug's connector in the long form.

    The short form `--kv-connector cornplug` cannot be combined with another connector.
    """
    kind, sharing = key.partition("_")[0], context.sharing
    extra = {"engine.app": sharing.app, "store.socket": STORE_SOCKET, **sharing.encoder.extra_config}
    extra |= {"engine.tower": "service"} if context.encoder_urls else {}
    failure = {"kv_load_failure_policy": "recompute"} if kind == "kv" else {}
    return {key: name, f"{kind}_role": f"{kind}_both", **failure, f"{key}_extra_config": extra}


def _gpu_generation(gpu: str) -> _Generation | None:
    """Return the generation of a GPU type ("H100", "NVIDIA-L40S", "A100-80"), or None if it is not known."""
    for pattern, generation in _GENERATIONS:
        if re.search(pattern, gpu, re.IGNORECASE):
            return generation
    return None


def backend_of(group: ReplicaGroup, pair_gpus: Iterable[str] = ()) -> str | None:
    """Return the name of the attention backend for a group's engine, or None if the engine chooses the
    backend.

    `pair_gpus` are the device types with which the group exchanges KV. NIXL's handshake in vLLM rejects
    different backends, so a prefill-decode pair on two GPU generations gets a backend that runs on both.
    """
    if group.settings is not None and group.settings.attention_backend is not None:
        return group.settings.attention_backend
    mla = group.kv is not None and group.kv.mla
    generations = {_gpu_generation(gpu) for gpu in {group.gpu, *pair_gpus}}
    if group.engine == "vllm" and len(generations) > 1:
        if mla:
            return "TRITON_MLA"
        return "FLASH_ATTN" if "blackwell" in generations else None
    generation = _gpu_generation(group.gpu)
    return _MLA_BACKENDS.get(generation, {}).get(group.engine) if mla and generation else None


def generator_command(
    server: GeneratorServer | None, model: str, *, tp: int = 1, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command of a generator's server, with the placeholders "{host}" and "{port}" for its
    address.

    The command is empty if `server` is None.
    """
    if server is None:
        return []
    argv = [server, "serve", model, "--omni", "--host", "{host}", "--port", "{port}"]
    argv += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
    return [*argv, *flags]
