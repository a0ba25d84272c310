"""What a plan becomes: which processes, where, with what beside them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from expected_errors import expect_error

from cornplug.config import load
from cornplug.encoder_service.server_flags import build_parser as encoder_parser
from cornplug.errors import ConfigError
from cornplug.planner.launch.command_lines import LaunchCommand, commands, name_of, write
from cornplug.planner.plan import Plan, QosReservation, RouteStage
from cornplug.store.daemon.main import store_parser

from ..plans import Case, matrix, plan

GOLDEN = Path(__file__).parents[2] / "golden" / "planner" / "commands.json"


def only(kind: str, found: list[LaunchCommand]) -> list[LaunchCommand]:
    return [command for command in found if command.kind == kind]


def test_commands_of_whole_plans_match_golden() -> None:
    """Whole plans as command lines: what a change of ours changes of them is seen here."""
    cases = {
        "E+PD on vLLM, caches and classes": Case("E+PD", caches=True, classes=True, replicas=2),
        "E+P+D on SGLang, two hosts": Case("E+P+D", "sglang", hosts=2),
        "E+P+D on vLLM, two hosts": Case("E+P+D", hosts=2, caches=True),
        "P+D on vLLM": Case("P+D", gpu="H100", mla=True),
        "mixture of experts on vLLM, attention-DP and EP": Case(dp=8, expert_parallel=True, mla=True),
        "mixture of experts on SGLang, attention-DP and EP": Case(
            engine="sglang", tp=2, dp=4, expert_parallel=True, mla=True
        ),
        "MLA on vLLM, context parallel": Case(tp=8, dcp=8, mla=True, caches=True),
        "MLA on vLLM, prefill context parallel": Case(tp=2, pcp=4, mla=True, caches=True),
        "monolith on cores": Case(gpu="cpu-core", caches=True),
    }
    made = {
        name: [
            {
                "kind": c.kind, "host": c.host, "cores": list(c.cores), "env": dict(c.env),
                "line": " ".join(c.argv), "remarks": list(c.remarks),
            }
            for c in commands(plan(case))
        ]
        for name, case in cases.items()
    }  # fmt: skip
    assert made == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.id)
def test_commands_of_one_host_have_distinct_ports_and_sockets(case: Case) -> None:
    found = commands(plan(case))
    ports = Counter((c.host, c.port) for c in found if c.port is not None)
    assert max(ports.values()) == 1
    side = Counter(
        (c.host, c.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        for c in found
        if "VLLM_NIXL_SIDE_CHANNEL_PORT" in c.env
    )
    assert not side or max(side.values()) == 1
    sockets = Counter((c.host, c.socket) for c in found if c.socket)
    assert not sockets or max(sockets.values()) == 1


def test_commands_of_replicas_have_distinct_gpus() -> None:
    devices: Counter[str] = Counter()
    for command in commands(plan(Case("E+P+D", tp=2, replicas=2))):
        devices.update(command.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if command.env else [])
    devices.pop("", None)
    # Two encoders, and two pairs of two ranks each; the second node's GPUs begin at 0 again.
    assert sum(devices.values()) == 2 + 4 + 4


def test_commands_store_only_on_hosts_that_share() -> None:
    assert only("store", commands(plan(Case()))) == []
    (store,) = only("store", commands(plan(Case(caches=True))))
    args = store_parser(load().store).parse_args(list(store.argv[2:]))
    assert args.size == 20 << 30
    (beside,) = only("store", commands(plan(Case("E+PD"))))
    assert beside.argv[-1] == "1GiB"
    apart = commands(plan(Case("E+PD", hosts=2)))
    assert [store.host for store in only("store", apart)] == ["${HOST_2}"]
    assert "--no-store" in only("encoder", apart)[0].argv


def test_commands_planned_embedding_cache_gives_distant_encoder_a_store() -> None:
    """Engines of several hosts find there what another host's engine had encoded."""
    apart = commands(plan(Case("E+PD", hosts=2, caches=True)))
    assert [store.host for store in only("store", apart)] == ["${HOST_1}", "${HOST_2}"]
    assert "--store-socket" in only("encoder", apart)[0].argv


def test_commands_encoder_replicas_of_host_are_one_service() -> None:
    (encoder,) = only("encoder", commands(plan(Case("E+PD", replicas=3, caches=True))))
    args = encoder_parser("").parse_args(list(encoder.argv[2:]))
    assert (args.replicas, args.port, args.model) == (3, 8750, ["Qwen/Qwen2-VL-7B-Instruct"])
    assert str(args.socket) == "${RUN_DIR}/encoder-8750.sock"
    assert encoder.env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    (half,) = only("encoder", commands(plan(Case("E+PD", share=0.5, replicas=2))))
    assert "--replicas" not in half.argv
    assert "share a device" in half.remarks[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_commands_engine_far_from_its_encoder_asks_it_by_url(engine: Literal["vllm", "sglang"]) -> None:
    found = commands(plan(Case("E+PD", engine, hosts=2)))
    (server,) = only("engine", found)
    assert server.argv[server.argv.index("--cornplug-encoder") + 1] == "http://${HOST_1}:8750"
    assert "--enable-mm-embeds" not in server.argv
    assert server.remarks == ()
    (encoder,) = only("encoder", found)
    args = encoder_parser("").parse_args(list(encoder.argv[2:]))
    assert (args.host, args.allow_anonymous) == ("0.0.0.0", None)
    assert "--allow-anonymous" in encoder.remarks[0]
    decided = plan(Case("E+PD", engine, hosts=2)).model_copy(update={"allow_anonymous": True})
    (encoder,) = only("encoder", commands(decided))
    assert "--allow-anonymous" in encoder.argv
    assert encoder.remarks == ()


def test_commands_engine_far_from_its_encoder_gives_all_hosts_one_secret() -> None:
    found = commands(plan(Case("E+P+D", hosts=2)))
    secrets = {name_of(c): c.env.get("CORNPLUG_STORE_SECRET_FILE") for c in found}
    assert secrets == {
        "store": "${SECRET_FILE}",
        "vit-E-nodes-0": "${SECRET_FILE}",
        "llm7-vit-P-nodes-0": "${SECRET_FILE}",
        # It shares nothing.
        "llm7-vit-D-nodes-0": None,
        "router-1": None,
    }
    assert not any("CORNPLUG_STORE_SECRET_FILE" in c.env for c in commands(plan(Case("E+P+D"))))


def test_commands_sglang_encoder_url_names_its_model() -> None:
    made = plan(Case("E+PD", "sglang", tower="service"))
    encoder, engine = made.groups
    more = encoder.model_copy(update={"encoder_models": ["/models/Other-VL", "/models/Mine"]})
    mine = engine.model_copy(update={"model": "/models/Mine"})
    (command,) = only("engine", commands(made.model_copy(update={"groups": [more, mine]})))
    assert "http://${HOST_1}:8750/sglang/Mine" in command.argv


@pytest.mark.parametrize(
    ("case", "asks"),
    [
        (Case("E+PD", "sglang", tower="service"), True),
        (Case("E+PD", "sglang"), False),
        (Case("E+PD", "vllm", tower="service"), False),
    ],
)
def test_commands_encoder_for_towerless_sglang_serves_its_protocol(case: Case, asks: bool) -> None:
    (encoder,) = only("encoder", commands(plan(case)))
    assert encoder_parser("").parse_args(list(encoder.argv[2:])).sglang is (True if asks else None)


@pytest.mark.parametrize("structure", ["E+PD", "E+P+D"])
def test_commands_sglang_beside_encoder_keeps_its_tower(structure: str) -> None:
    """A dead encoder service costs it time, and no request."""
    engine = only("engine", commands(plan(Case(structure, "sglang"))))[0]
    assert "--language-only" not in engine.argv
    assert "--enable-multimodal" in engine.argv
    assert engine.argv[engine.argv.index("--cornplug-encoder") + 1] == "${RUN_DIR}/encoder-8750.sock"


@pytest.mark.parametrize(
    "case",
    [
        Case(mla=True, caches=True),
        Case(quantisation="fp8", fp8_kv=True, caches=True),
        Case("P+D", mla=True, caches=True),
        Case(dp=8, expert_parallel=True, mla=True, caches=True),
        Case(tp=8, dcp=8, mla=True, caches=True),
        Case(engine="sglang", mla=True, caches=True),
        Case(engine="sglang", quantisation="fp8", fp8_kv=True, caches=True),
        Case(engine="sglang", tp=4, pp=2, caches=True),
        Case("P+D", "sglang", caches=True),
        Case(engine="sglang", speculative="eagle3", caches=True),
    ],
    ids=lambda case: case.id,
)
def test_commands_leave_sharing_of_kv_to_the_engines_rules(case: Case) -> None:
    """The engine knows what it can share, and says why not: the plan knows only where sharing has a use."""
    for command in only("engine", commands(plan(case))):
        decodes = "decode" in command.argv or "kv_consumer" in " ".join(command.argv)
        assert ("store.sock" in " ".join(command.argv)) is not decodes
        assert "CORNPLUG_ENGINE_SHARE_KV" not in command.env


def test_commands_engine_that_encodes_some_media_keeps_its_tower() -> None:
    made = plan(Case("E+PD", "sglang", tower="service"))
    encoder, engine = made.groups
    both = engine.model_copy(update={"tasks": "EPD"})
    (command,) = only("engine", commands(made.model_copy(update={"groups": [encoder, both]})))
    assert "--language-only" not in command.argv


def test_commands_towerless_vllm_asks_by_url() -> None:
    found = commands(plan(Case("E+PD", tower="service")))
    (engine,) = only("engine", found)
    assert engine.argv[engine.argv.index("--cornplug-tower") + 1] == "service"
    assert engine.argv[engine.argv.index("--cornplug-encoder") + 1] == "http://${HOST_1}:8750"
    assert engine.env["CORNPLUG_STORE_SECRET_FILE"] == "${SECRET_FILE}"


def test_commands_lmcache_transfer_starts_kv_server() -> None:
    found = commands(plan(Case("P+D")), transfer="lmcache")
    (server,) = [c for c in found if c.group == "kv-server"]
    # 2 x 28 layers x 8192 tokens x 4 heads x 128 x 2 bytes = 448 MiB, so 512 for each of the two.
    assert server.argv[server.argv.index("--l1-size-gb") + 1] == "1"


def test_commands_external_generator_is_remark_only() -> None:
    made = plan(Case())
    group = made.groups[0].model_copy(
        update={"name": "tts/G", "tasks": "G", "engine": "external", "settings": None, "model": "org/tts"}
    )
    stages = [RouteStage(tasks="G", groups={"tts/G": 1.0})]
    route = made.routes[0].model_copy(update={"stages": stages})
    (command,) = commands(made.model_copy(update={"groups": [group], "routes": [route]}))
    assert (command.kind, command.argv) == ("external", ())
    assert "org/tts" in command.remarks[0]


def test_named_hosts_are_used_as_they_are() -> None:
    made = plan(Case(caches=True))
    named = made.model_copy(update={"nodes": [made.nodes[0].model_copy(update={"hosts": ["gpu-7"]})]})
    assert {command.host for command in commands(named)} == {"gpu-7"}


def test_write_classes_of_service_load_as_qos_config(tmp_path: Path) -> None:
    write(plan(Case(classes=True)), tmp_path)
    classes = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "qos.toml")}).qos.classes
    assert (classes["premium"].share, classes["premium"].deadline_s) == (0.5, 2.0)
    assert classes["premium"].apps == ("chat",)
    assert (classes["nightly"].priority, classes["nightly"].deadline_s) == (-1, None)


def test_write_qos_shares_are_rounded_down(tmp_path: Path) -> None:
    """Six sixths, each to four digits, would be refused."""
    made = plan(Case(classes=True))
    sixths = [QosReservation(qos=f"c{n}", share=1 / 6, priority=0) for n in range(6)]
    write(made.model_copy(update={"reservations": sixths}), tmp_path)
    classes = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "qos.toml")}).qos.classes
    assert sum(one.share for one in classes.values()) == pytest.approx(1, abs=1e-3)


def broken(**changes: object) -> Plan:
    made = plan(Case())
    return made.model_copy(update={"groups": [made.groups[0].model_copy(update=changes)]})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"placement": []}, "placement"),
        ({"placement": [[7, 0]]}, "placement"),
        ({"nodes": "elsewhere"}, "nodes"),
        ({"settings": None}, "settings"),
    ],
)
def test_commands_incomplete_plan_names_missing_field(changes: dict[str, object], field: str) -> None:
    with expect_error(ConfigError, field=f"groups['llm7+vit/EPD@nodes'].{field}"):
        commands(broken(**changes))
