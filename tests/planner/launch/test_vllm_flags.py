"""Every vLLM line that we emit, through vLLM's own parser with our plugin loaded (case A18)."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cornplug.engine_common.shared_flags import load_settings
from cornplug.planner.launch.command_lines import LaunchCommand, commands
from cornplug.planner.launch.connections import Transfer
from cornplug.vllm_connector import plugin
from devkit.checkpoints import qwen2_vl
from devkit.vllm_cli import parse_serve

from ..plans import Case, matrix, plan

# Nothing is started, but vLLM's parser and its checks of a config take half a minute.
pytestmark = pytest.mark.more

VALUES = {"RUN_DIR": "/run/x", "PLAN_DIR": "/plan", "SECRET_FILE": "/etc/cornplug/secret"}
VALUES |= {f"HOST_{n}": f"10.0.0.{n}" for n in range(1, 10)}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
VLLM = [case for case in matrix() if case.engine == "vllm"]


def engines(case: Case, transfer: Transfer = "nixl") -> list[LaunchCommand]:
    found = [c.substitute(VALUES) for c in commands(plan(case), transfer=transfer) if c.kind == "engine"]
    assert found
    return found


def parsed(command: LaunchCommand) -> Namespace:
    assert command.argv[:2] == ("vllm", "serve")
    plugin.register()
    return parse_serve(command.argv[2:])


def engine_args(command: LaunchCommand) -> AsyncEngineArgs:
    args = parsed(command)
    # A folder that is there: without a network vLLM looks for anything else in the hub's cache.
    args.model = str(Path(__file__).parent)
    return AsyncEngineArgs.from_cli_args(args)


@pytest.fixture(autouse=True)
def common_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every command of a plan with distant encoders has it."""
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", VALUES["SECRET_FILE"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(qwen2_vl(tmp_path_factory.mktemp("models") / "vl"))


@pytest.mark.parametrize("case", VLLM, ids=lambda case: case.id)
def test_vllm_flags_every_case_is_accepted_by_vllm(case: Case, checkpoint: str) -> None:
    """By the parser, and where our small model allows it by all of vLLM's checks of one flag against
    another: two heads, 4096 positions, no experts, no latent attention, nothing to speculate with."""
    for command in engines(case):
        if command.replica:  # the first one's line, but for its ports and GPUs
            continue
        made = engine_args(command)
        group = next(g for g in plan(case).groups if g.name == command.group)
        assert (made.tensor_parallel_size, made.pipeline_parallel_size) == (group.tp, group.pp)
        assert made.decode_context_parallel_size == group.dcp
        assert made.prefill_context_parallel_size == group.pcp
        assert (made.data_parallel_size, made.enable_expert_parallel) == (group.dp, group.expert_parallel)
        assert (made.max_model_len, made.max_num_seqs, made.max_num_batched_tokens) == (8192, 128, 4096)
        assert not any("${" in word for word in (*command.argv, *command.env.values()))
        allowed = case.speculative == "none" and not case.expert_parallel and group.pcp == 1
        if group.tp <= 2 and allowed:
            made.model, made.max_model_len = checkpoint, 4096
            assert made.create_engine_config().scheduler_config.max_num_batched_tokens == 4096


PAIRS = [c for c in VLLM if "P+D" in c.structure and max(c.tp, c.decode_tp or 1) <= 2]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.id)
def test_vllm_flags_pair_has_one_nixl_compatibility_hash(case: Case, checkpoint: str) -> None:
    hashes = set()
    for command in engines(case):
        made = engine_args(command)
        made.model, made.max_model_len = checkpoint, 4096
        group = next(g for g in plan(case).groups if g.name == command.group)
        # Left to vLLM, it is FlashInfer's on Blackwell, and FlashAttention before.
        own = "FLASHINFER" if group.gpu == "B200" else "FLASH_ATTN"
        backend = str(made.attention_backend or own)
        hashes.add(compute_nixl_compatibility_hash(made.create_engine_config(), backend))
    assert len(hashes) == 1


@pytest.mark.parametrize("structure", ["E+PD", "E+P+D"])
def test_vllm_flags_distant_encoder_is_asked_by_url(structure: str) -> None:
    first, *decode = engines(Case(structure, hosts=2))
    assert first.env["CORNPLUG_STORE_SECRET_FILE"] == VALUES["SECRET_FILE"]
    made = engine_args(first)
    found = load_settings(made.ec_transfer_config.ec_connector_extra_config)
    assert found.encoder.engine_urls == ("http://10.0.0.1:8750",)
    assert found.store.secret_file == Path("/etc/cornplug/secret")
    assert found.store.socket == Path("/run/x/store.sock")
    assert not made.enable_mm_embeds
    assert not any("cornplug" in word for command in decode for word in command.argv)


@pytest.mark.parametrize("transfer", ["nixl", "mooncake", "lmcache"])
@pytest.mark.parametrize("caches", [False, True])
def test_vllm_flags_connectors_are_registered(transfer: Transfer, caches: bool) -> None:
    prefill, decode = engines(Case("P+D", caches=caches), transfer)
    for command, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        config = engine_args(command).kv_transfer_config
        assert config.kv_load_failure_policy == "recompute"
        children = config.kv_connector_extra_config.get("connectors")
        first = children[0] if children else vars(config)
        assert first["kv_role"] == ("kv_both" if transfer == "lmcache" else role)
        for name in [config.kv_connector, *(child["kv_connector"] for child in children or [])]:
            assert name in KVConnectorFactory._registry
    # What is computed there is shared; decode only takes what prefill made.
    assert ("CornplugConnector" in " ".join(prefill.argv)) == caches
    assert "Cornplug" not in " ".join(decode.argv)


def test_vllm_flags_caches_add_cornplug_connectors_to_transfer() -> None:
    prefill = engine_args(engines(Case("E+P+D", caches=True))[0])
    ours = prefill.kv_transfer_config.kv_connector_extra_config["connectors"][1]
    assert ours["kv_connector_extra_config"] == {
        "engine.app": "chat",
        "store.socket": "/run/x/store.sock",
        "encoder.socket": "/run/x/encoder-8750.sock",
    }
    ec = prefill.ec_transfer_config
    assert ec.ec_connector in ECConnectorFactory._registry
    assert (ec.ec_role, ec.ec_connector_extra_config) == ("ec_both", ours["kv_connector_extra_config"])


def test_vllm_flags_short_flag_sets_kv_and_ec_connector() -> None:
    (command,) = engines(Case("E+PD", caches=True))
    made = engine_args(command)
    assert made.kv_transfer_config.kv_connector == "CornplugConnector"
    assert made.ec_transfer_config.ec_connector_extra_config["encoder.socket"] == "/run/x/encoder-8750.sock"
    assert "CORNPLUG_ENGINE_SHARE_KV" not in command.env


def test_vllm_flags_without_planned_cache_share_nothing() -> None:
    (alone,) = engines(Case())
    assert not any("cornplug" in word for word in alone.argv)
    (encoded,) = engines(Case("E+PD"))
    assert encoded.env["CORNPLUG_ENGINE_SHARE_KV"] == "false"


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [("H100", "FLASHMLA"), ("B200", "FLASHINFER_MLA"), ("L4", "TRITON_MLA"), ("A100-80", "TRITON_MLA")],
)
def test_vllm_flags_mla_backend_follows_gpu_generation(gpu: str, backend: str) -> None:
    (command,) = engines(Case(mla=True, gpu=gpu))
    made = engine_args(command)
    assert made.attention_backend == backend
    assert backend in AttentionBackendEnum.__members__
    assert made.block_size == 64
    (plain,) = engines(Case(gpu=gpu))
    assert "--attention-backend" not in plain.argv


@pytest.mark.parametrize(
    ("speculative", "config"),
    [
        ("mtp", {"method": "mtp", "num_speculative_tokens": 3}),
        ("eagle3", {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}),
    ],
)
def test_vllm_flags_speculation_sets_config(speculative: Any, config: dict[str, Any]) -> None:
    (command,) = engines(Case(speculative=speculative))
    made = parsed(command)
    given = made.speculative_config or {
        "method": made.spec_method, "model": made.spec_model, "num_speculative_tokens": made.spec_tokens,
    }  # fmt: skip
    assert (json.loads(given) if isinstance(given, str) else given) == config


@pytest.mark.parametrize(
    ("workload", "mode", "interval", "bounded"),
    [
        ("online", "interactivity", 1, True),
        ("semi-online", "balanced", 1, False),
        ("offline", "throughput", 10, False),
    ],
)
def test_vllm_flags_workload_sets_mode_and_queue_limit(
    workload: Any, mode: str, interval: int, bounded: bool
) -> None:
    (command,) = engines(Case(workload=workload))
    made = engine_args(command)
    assert (made.performance_mode, made.stream_interval) == (mode, interval)
    # TTFT bound 0.5 s at 20,000 tokens a second; 10,000 is over one prompt's 8192.
    assert made.max_num_queued_tokens == (10_000 if bounded else None)
    assert parsed(command).shutdown_timeout == 40


def test_vllm_flags_shared_gpu_sets_exact_kv_bytes() -> None:
    one, two = engines(Case(share=0.5, replicas=2))
    made = [engine_args(one), engine_args(two)]
    assert [m.kv_cache_memory_bytes for m in made] == [12 << 30] * 2
    assert sum(m.gpu_memory_utilization for m in made) < 1
    assert one.env["CUDA_VISIBLE_DEVICES"] == two.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert one.port != two.port
    assert engine_args(engines(Case())[0]).kv_cache_memory_bytes is None


def test_vllm_flags_replica_over_two_nodes_is_two_commands() -> None:
    first, second, *_ = engines(Case(tp=8, pp=2, replicas=2))
    made = [engine_args(first), engine_args(second)]
    assert [(m.nnodes, m.node_rank, m.master_addr) for m in made] == [(2, 0, "10.0.0.1"), (2, 1, "10.0.0.1")]
    assert [parsed(first).headless, parsed(second).headless] == [False, True]
    assert (first.host, second.host) == ("10.0.0.1", "10.0.0.2")


def test_vllm_flags_classes_set_priority_and_admission() -> None:
    command = engines(Case(classes=True, replicas=2))[0]
    args = parsed(command)
    assert args.scheduling_policy == "priority"
    assert args.middleware == ["cornplug.vllm_connector.admission.Admission"]
    assert command.env["CORNPLUG_CONFIG"] == "/plan/qos.toml"
    assert parsed(engines(Case())[0]).scheduling_policy == "fcfs"


def test_vllm_flags_cpu_core_binds_threads() -> None:
    (command,) = engines(Case(gpu="cpu-core", tp=2))
    made = engine_args(command)
    assert made.enforce_eager
    assert made.kv_cache_memory_bytes == 12 << 30
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "CUDA_VISIBLE_DEVICES" not in command.env
    assert command.cores == (0, 1)


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=8, expert_parallel=True),
        Case(tp=2, dp=4, expert_parallel=True),
        Case(tp=8, dcp=4),
        Case(tp=4, dcp=2, dp=2),
    ],
    ids=lambda case: case.id,
)
def test_vllm_flags_degrees_pass_checks_of_mixture(case: Case, tmp_path: Path) -> None:
    """By all of vLLM's checks against a model: Qwen3-MoE's config.json with eight heads and two KV heads."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    (command,) = engines(case)
    made = engine_args(command)
    made.model, made.max_model_len, made.skip_tokenizer_init = str(tmp_path), 4096, True
    parallel = made.create_engine_config().parallel_config
    assert parallel.data_parallel_size == case.dp
    assert parallel.decode_context_parallel_size == case.dcp
    assert parallel.enable_expert_parallel == case.expert_parallel
    assert parallel.world_size_across_dp == case.tp * case.dp


@pytest.mark.parametrize("gpu", ["H100", "B200", "L4", "A100-80"])
def test_vllm_flags_backend_of_context_parallel_mla_supports_it(gpu: str) -> None:
    (command,) = engines(Case(tp=8, dcp=8, mla=True, gpu=gpu))
    backend = AttentionBackendEnum[engine_args(command).attention_backend].get_path()
    module, _, name = backend.rpartition(".")
    text = Path(*[str(Path(vllm.__file__).parent), *module.split(".")[1:]]).with_suffix(".py").read_text()
    assert name in text
    assert "supports_dcp: bool = True" in text, "read, as its kernels need a GPU to be imported"
