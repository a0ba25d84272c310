"""The plan of an apps file: commands, routes, classes of service and namespaces."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from cornplug.apps import plan_of
from cornplug.config import load
from cornplug.planner.launch import command_lines
from cornplug.planner.launch.command_lines import LaunchCommand

from .services import services


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, LaunchCommand]:
    return {command.group: command for command in command_lines.commands(plan_of(services(tmp_path)))}


def value(command: LaunchCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_plan_of_services_has_a_process_for_each_launched_component(
    commands: dict[str, LaunchCommand],
) -> None:
    assert list(commands) == ["store", "tower-of-small", "small", "large", "speech"]
    assert [c.kind for c in commands.values()] == ["store", "encoder", "engine", "engine", "external"]
    assert [c.port for c in commands.values()] == [None, 19250, 18500, 18501, 18502]


def test_plan_of_one_tower_serves_both_models(commands: dict[str, LaunchCommand]) -> None:
    argv = commands["tower-of-small"].argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--model"] == ["org/small", "org/large"]
    assert commands["tower-of-small"].env["CUDA_VISIBLE_DEVICES"] == "3"


def test_plan_of_vllm_component_asks_store_and_encoder(commands: dict[str, LaunchCommand]) -> None:
    small = commands["small"]
    assert small.argv[:3] == ("vllm", "serve", "org/small")
    assert value(small, "--cornplug-app") == "chat-vlm"
    assert value(small, "--cornplug-encoder") == "${RUN_DIR}/encoder-19250.sock"
    assert "--max-model-len" not in small.argv


def test_plan_of_sglang_component_has_its_flags_last(commands: dict[str, LaunchCommand]) -> None:
    large = commands["large"]
    assert large.argv[:3] == ("python", "-m", "sglang.launch_server")
    assert value(large, "--tp-size") == "2"
    assert large.argv[-2:] == ("--context-length", "4096")
    assert large.env["NCCL_DEBUG"] == "WARN"
    assert large.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_plan_of_generator_runs_its_command_at_its_port(commands: dict[str, LaunchCommand]) -> None:
    speech = commands["speech"]
    assert speech.argv == ("python", "speech.py", "--port", "18502")
    assert speech.health == "http://127.0.0.1:18502/ok"


def test_plan_of_generator_of_vllm_omni_has_its_command(tmp_path: Path) -> None:
    known = ('kind = "generator"', 'kind = "generator"\nserver = "vllm-omni"\nmodel = "org/speech"')
    own = ('command = ["python", "speech.py", "--port", "{port}"]\nhealth = "/ok"', 'flags = ["--log-stats"]')
    made = plan_of(services(tmp_path, known, own))
    speech = next(command for command in command_lines.commands(made) if command.group == "speech")
    address = ("--host", "127.0.0.1", "--port", "18502")
    assert speech.argv == ("vllm-omni", "serve", "org/speech", "--omni", *address, "--log-stats")
    assert speech.health == "http://127.0.0.1:18502/health"


def test_plan_of_generator_beside_the_file_is_found_from_anywhere(tmp_path: Path) -> None:
    made = plan_of(services(tmp_path, ('"speech.py"', '"./speech.py"')))
    speech = next(group for group in made.groups if group.name == "speech")
    assert speech.command[1] == str(tmp_path / "speech.py")


def test_plan_of_tenant_and_priority_are_in_routes(tmp_path: Path) -> None:
    routes = json.loads(command_lines.files(plan_of(services(tmp_path)))["routes.json"])
    pro = routes["chat-vlm-pro/picture"]
    assert pro == {
        "priority": -10,
        "cache_salt": "acme",
        "to": [{"weight": 1.0, "url": "http://127.0.0.1:18501"}],
    }
    assert "cache_salt" not in routes["chat-vlm/text"]
    assert routes["tts/answer"]["priority"] == 0


def test_plan_of_path_without_encoder_leaves_the_tower_to_the_engine(tmp_path: Path) -> None:
    own = 'routes = [{ request = "picture", path = ["large"] }]\ntenant = "acme"'
    made = plan_of(services(tmp_path, ('tenant = "acme"', own)))
    route = next(r for r in made.routes if r.app == "chat-vlm-pro")
    assert (route.structure, [stage.tasks for stage in route.stages]) == ("monolith", ["EPD"])
    large = next(c for c in command_lines.commands(made) if c.group == "large")
    assert "--language-only" not in large.argv
    assert "--enable-multimodal" in large.argv


def test_plan_of_namespaces_and_classes_are_settings_that_load(tmp_path: Path) -> None:
    files = command_lines.files(plan_of(services(tmp_path)))
    for name in ("store.toml", "qos.toml"):
        (tmp_path / name).write_text(files[name])
        assert tomllib.loads(files[name])
    store = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "store.toml")}).store
    assert store.namespaces["chat-vlm"].ttl_s == 3600
    assert store.namespaces["chat-vlm"].share == 0.25
    qos = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "qos.toml")}).qos
    assert qos.classes["premium"].apps == ("chat-vlm-pro",)
    assert qos.classes["premium"].deadline_s == 2


def test_plan_of_components_without_devices_have_the_next_free_ones(tmp_path: Path) -> None:
    made = plan_of(services(tmp_path, ("devices = [0] }", "replicas = 2 }")))
    small = next(group for group in made.groups if group.name == "small")
    assert small.placement == [[0, 4], [0, 5]]
    assert small.ports == [18500, 18501]


def test_plan_of_saved_file_is_read_again(tmp_path: Path) -> None:
    made = plan_of(services(tmp_path))
    made.save(tmp_path / "plan.json")
    assert type(made).load(tmp_path / "plan.json") == made
