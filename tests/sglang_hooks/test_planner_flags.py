"""Every SGLang line that the planner emits, through SGLang's own parser and record (case A18)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from cornplug.planner.launch.command_lines import LaunchCommand, commands
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv import hicache_config
from devkit.checkpoints import qwen2_vl


def _plans() -> ModuleType:
    """The planner's matrix, which lives with its own tests, of another environment."""
    path = Path(__file__).parents[1] / "planner" / "plans.py"
    spec = importlib.util.spec_from_file_location("planner_plans", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plans = _plans()
Case = plans.Case
SGLANG = [case for case in plans.matrix() if case.engine == "sglang"]
VALUES = {"RUN_DIR": "/run/x", "PLAN_DIR": "/plan", "SECRET_FILE": "/etc/cornplug/secret"}
VALUES |= {f"HOST_{n}": f"10.0.0.{n}" for n in range(1, 10)}


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    load_plugins()
    yield
    activation.turn_off()


@pytest.fixture(autouse=True)
def prepared_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As commands.txt demands where encoders are on other hosts: the secret, and the extra `remote`."""
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", VALUES["SECRET_FILE"])
    if importlib.util.find_spec("cryptography") is None:
        stub = ModuleType("cryptography")
        stub.__spec__ = ModuleSpec("cryptography", None)
        monkeypatch.setitem(sys.modules, "cryptography", stub)


def engines(case: Any, **how: Any) -> list[LaunchCommand]:
    found = [c.substitute(VALUES) for c in commands(plans.plan(case), **how) if c.kind == "engine"]
    assert found
    return found


def record(command: LaunchCommand) -> ServerArgs:
    """What the operator gave, as SGLang keeps it before it resolves anything."""
    assert command.argv[:3] == ("python", "-m", "sglang.launch_server")
    return prepare_server_args(list(command.argv[3:]))


@pytest.mark.parametrize("case", SGLANG, ids=lambda case: case.id)
def test_planner_lines_are_parsed_by_sglang(case: Any) -> None:
    for command in engines(case):
        made = record(command)
        group = next(g for g in plans.plan(case).groups if g.name == command.group)
        assert (made.tp_size, made.pp_size) == (group.tp * group.dp, group.pp)
        assert (made.attn_dp_size, made.dp_size) == (group.dp, 1)
        assert made.ep_size == (group.tp * group.dp if group.expert_parallel else 1)
        assert (made.context_length, made.max_running_requests) == (8192, 128 * group.dp)
        assert made.chunked_prefill_size == 4096 * group.dp
        assert not any("${" in word for word in (*command.argv, *command.env.values()))


def test_planner_prefill_and_decode_agree_on_transfer() -> None:
    prefill, decode = engines(Case("P+D", "sglang"))
    p, d = record(prefill), record(decode)
    assert (p.disaggregation_mode, d.disaggregation_mode) == ("prefill", "decode")
    assert p.disaggregation_transfer_backend == d.disaggregation_transfer_backend == "nixl"
    assert p.page_size == d.page_size == 128
    assert p.chunked_prefill_size % p.page_size == 0
    assert p.disaggregation_bootstrap_port == 8998
    assert "SGLANG_DISAGG_STAGING_BUFFER" not in prefill.env


def test_planner_pair_of_unequal_tp_sets_staging_buffer() -> None:
    for command in engines(Case("P+D", "sglang", decode_tp=4)):
        assert command.env["SGLANG_DISAGG_STAGING_BUFFER"] == "true"
        assert int(command.env["SGLANG_DISAGG_STAGING_POOL_SIZE_MB"]) % 256 == 0


def test_planner_role_switch_needs_mooncake() -> None:
    for transfer, may in (("nixl", False), ("mooncake", True)):
        for command in engines(Case("P+D", "sglang"), transfer=transfer):
            assert record(command).enable_pd_role_switch is may


def test_planner_language_only_line_names_encoders() -> None:
    (command,) = engines(Case("E+PD", "sglang", hosts=2, caches=True))
    assert not record(command).language_only
    (command,) = engines(Case("E+PD", "sglang", hosts=2, caches=True, tower="service"))
    made = record(command)
    assert made.language_only
    assert made.encoder_urls == ["http://10.0.0.1:8750"]
    assert made.dtype == "bfloat16"
    assert activation.is_on()
    assert activation.config().encoder.engine_urls == ("http://10.0.0.1:8750",)
    assert activation.config().store.secret_file == Path("/etc/cornplug/secret")


def test_planner_speculation_sets_all_three_numbers() -> None:
    for speculative, algorithm in (("mtp", "NEXTN"), ("eagle3", "EAGLE3")):
        (command,) = engines(Case(engine="sglang", speculative=speculative))
        made = record(command)
        assert made.speculative_algorithm == algorithm
        assert made.speculative_num_steps == 3
        assert made.speculative_eagle_topk == 1
        assert made.speculative_num_draft_tokens == 4


@pytest.mark.parametrize(
    ("workload", "policy", "queued", "mixed"),
    [("online", "lpm", 2, False), ("semi-online", "hrrn", None, False), ("offline", "fcfs", None, True)],
)
def test_planner_workload_sets_schedule_policy(
    workload: str, policy: str, queued: int | None, mixed: bool
) -> None:
    (command,) = engines(Case(engine="sglang", workload=workload))
    made = record(command)
    assert (made.schedule_policy, made.max_queued_requests, made.enable_mixed_chunk) == (
        policy,
        queued,
        mixed,
    )


def test_planner_priorities_set_matching_policy() -> None:
    made = record(engines(Case(engine="sglang", classes=True, replicas=2))[0])
    assert made.enable_priority_scheduling
    assert made.schedule_low_priority_values_first
    assert made.default_priority_value == 0
    assert made.schedule_policy in ("fcfs", "lof")
    assert not record(engines(Case(engine="sglang"))[0]).enable_priority_scheduling


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [("H100", "flashmla"), ("B200", "trtllm_mla"), ("L4", "triton"), ("A100-80", "triton")],
)
def test_planner_mla_backend_follows_gpu_generation(gpu: str, backend: str) -> None:
    made = record(engines(Case(engine="sglang", mla=True, gpu=gpu))[0])
    assert (made.attention_backend, made.page_size) == (backend, 64)


def test_planner_replicas_on_one_gpu_get_token_limit() -> None:
    for command in engines(Case(engine="sglang", share=0.5, replicas=2)):
        assert record(command).max_total_tokens == 200_000
        assert command.shares_gpu
    assert record(engines(Case(engine="sglang"))[0]).max_total_tokens is None


def test_planner_replica_over_two_nodes_is_two_commands() -> None:
    first, second, *_ = engines(Case(engine="sglang", tp=8, pp=2, replicas=2))
    made = [record(first), record(second)]
    assert [(m.nnodes, m.node_rank, m.dist_init_addr) for m in made] == [
        (2, 0, "10.0.0.1:29500"),
        (2, 1, "10.0.0.1:29500"),
    ]
    assert second.health is None


def test_planner_cpu_core_line_binds_threads() -> None:
    (command,) = engines(Case(engine="sglang", gpu="cpu-core", tp=2))
    made = record(command)
    assert (made.device, made.attention_backend) == ("cpu", "torch_native")
    assert command.env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(qwen2_vl(tmp_path_factory.mktemp("models") / "vl"))


RESOLVED = [
    *(Case(s, "sglang", w) for s in plans.STRUCTURES for w in plans.WORKLOADS),
    Case(engine="sglang", caches=True, classes=True),
    Case("E+P+D", "sglang", caches=True, classes=True),
    Case(engine="sglang", speculative="mtp"),
    Case(engine="sglang", share=0.5, replicas=2),
    Case(engine="sglang", dp=2),
    Case(engine="sglang", dp=2, caches=True),
    Case(engine="sglang", pp=2, caches=True),
    Case("P+D", "sglang", caches=True),
]


@pytest.mark.parametrize("case", RESOLVED, ids=lambda case: case.id)
def test_planner_lines_resolve_in_sglang(case: Any, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of 4096 positions, and this machine's device: without a GPU the kernels are others."""
    # Compiling takes half a minute, and what is here tested does not need it.
    monkeypatch.setattr(hicache_config, "compile_hash", lambda: None)
    for command in engines(case):
        words = list(command.argv[3:])
        for flag, value in (("--model-path", checkpoint), ("--context-length", "4096")):
            words[words.index(flag) + 1] = value
        made = prepare_server_args([*words, "--device", "cpu", "--attention-backend", "torch_native"])
        made.resolve_once()
