"""The deployment of an apps file: commands, routes, classes of service and namespaces."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from cornplug.apps import deployment_of
from cornplug.config import load
from cornplug.planner.launch import command_lines
from cornplug.planner.launch.command_lines import LaunchCommand
from cornplug.planner.plan import Deployment

from .services import services


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, LaunchCommand]:
    return {command.group: command for command in command_lines.commands(deployment_of(services(tmp_path)))}


def value(command: LaunchCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_deployment_of_services_has_a_process_for_each_launched_component(
    commands: dict[str, LaunchCommand],
) -> None:
    assert list(commands) == ["store", "tower-of-small", "small", "large", "speech"]
    assert [c.kind for c in commands.values()] == ["store", "encoder", "engine", "engine", "external"]
    assert [c.port for c in commands.values()] == [None, 19250, 18500, 18501, 18502]


def test_deployment_of_one_tower_serves_both_models(commands: dict[str, LaunchCommand]) -> None:
    argv = commands["tower-of-small"].argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--model"] == ["org/small", "org/large"]
    assert commands["tower-of-small"].env["CUDA_VISIBLE_DEVICES"] == "3"


def test_deployment_of_vllm_component_asks_store_and_encoder(commands: dict[str, LaunchCommand]) -> None:
    small = commands["small"]
    assert small.argv[:3] == ("vllm", "serve", "org/small")
    assert value(small, "--cornplug-app") == "chat-vlm"
    assert value(small, "--cornplug-encoder") == "${RUN_DIR}/encoder-19250.sock"
    assert "--max-model-len" not in small.argv


def test_deployment_of_sglang_component_has_its_flags_last(commands: dict[str, LaunchCommand]) -> None:
    large = commands["large"]
    assert large.argv[:3] == ("python", "-m", "sglang.launch_server")
    assert value(large, "--tp-size") == "2"
    assert large.argv[-2:] == ("--context-length", "4096")
    assert large.env["NCCL_DEBUG"] == "WARN"
    assert large.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_deployment_of_generator_runs_its_command_at_its_port(commands: dict[str, LaunchCommand]) -> None:
    speech = commands["speech"]
    assert speech.argv == ("python", "speech.py", "--port", "18502")
    assert speech.health == "http://127.0.0.1:18502/ok"


def test_deployment_of_generator_of_vllm_omni_has_its_command(tmp_path: Path) -> None:
    known = ('kind = "generator"', 'kind = "generator"\nserver = "vllm-omni"\nmodel = "org/speech"')
    own = ('command = ["python", "speech.py", "--port", "{port}"]\nhealth = "/ok"', 'flags = ["--log-stats"]')
    made = deployment_of(services(tmp_path, known, own))
    speech = next(command for command in command_lines.commands(made) if command.group == "speech")
    address = ("--host", "127.0.0.1", "--port", "18502")
    assert speech.argv == ("vllm-omni", "serve", "org/speech", "--omni", *address, "--log-stats")
    assert speech.health == "http://127.0.0.1:18502/health"


def test_deployment_of_generator_beside_the_file_is_found_from_anywhere(tmp_path: Path) -> None:
    made = deployment_of(services(tmp_path, ('"speech.py"', '"./speech.py"')))
    speech = next(group for group in made.groups if group.name == "speech")
    assert speech.command[1] == str(tmp_path / "speech.py")


def test_deployment_of_tenant_and_priority_are_in_routes(tmp_path: Path) -> None:
    routes = json.loads(command_lines.files(deployment_of(services(tmp_path)))["routes.json"])
    pro = routes["chat-vlm-pro/picture"]
    assert pro == {
        "priority": -32,
        "cache_salt": "acme",
        "to": [{"weight": 1.0, "url": "http://127.0.0.1:18501"}],
    }
    assert "cache_salt" not in routes["chat-vlm/text"]
    assert routes["tts/answer"]["priority"] == 0


def test_deployment_of_path_without_encoder_leaves_the_tower_to_the_engine(tmp_path: Path) -> None:
    own = 'routes = [{ request = "picture", path = ["large"] }]\ntenant = "acme"'
    made = deployment_of(services(tmp_path, ('tenant = "acme"', own)))
    route = next(r for r in made.routes if r.app == "chat-vlm-pro")
    assert (route.structure, [stage.tasks for stage in route.stages]) == ("monolith", ["EPD"])
    large = next(c for c in command_lines.commands(made) if c.group == "large")
    assert "--language-only" not in large.argv
    assert "--enable-multimodal" in large.argv


def test_deployment_of_namespaces_and_classes_are_settings_that_load(tmp_path: Path) -> None:
    files = command_lines.files(deployment_of(services(tmp_path)))
    for name in ("store.toml", "qos.toml"):
        (tmp_path / name).write_text(files[name])
        assert tomllib.loads(files[name])
    store = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "store.toml")}).store
    assert store.namespaces["chat-vlm"].ttl_s == 3600
    assert store.namespaces["chat-vlm"].share == 0.25
    qos = load(environ={"CORNPLUG_CONFIG": str(tmp_path / "qos.toml")}).qos
    assert qos.classes["premium"].apps == ("chat-vlm-pro",)
    assert qos.classes["premium"].deadline_s == 2


def test_deployment_of_components_without_devices_have_the_next_free_ones(tmp_path: Path) -> None:
    made = deployment_of(services(tmp_path, ("devices = [0] }", "replicas = 2 }")))
    small = next(group for group in made.groups if group.name == "small")
    assert small.placement == [[0, 4], [0, 5]]
    assert small.ports == [18500, 18501]


def test_deployment_of_sglang_beside_encoder_keeps_its_tower(commands: dict[str, LaunchCommand]) -> None:
    large = commands["large"]
    assert "--language-only" not in large.argv
    assert "--enable-multimodal" in large.argv
    assert value(large, "--cornplug-encoder") == "${RUN_DIR}/encoder-19250.sock"
    assert "--sglang" not in commands["tower-of-small"].argv


def test_deployment_of_sglang_without_tower_asks_the_service(tmp_path: Path) -> None:
    made = deployment_of(
        services(tmp_path, ('engines = ["sglang"]', 'engines = ["sglang"]\ntower = "service"'))
    )
    found = {c.group: c for c in command_lines.commands(made)}
    assert value(found["large"], "--encoder-urls") == "http://127.0.0.1:19250/sglang/org/large"
    assert "--sglang" in found["tower-of-small"].argv


def words(made: Deployment) -> str:
    """Every command and file of a plan."""
    found = [
        word for c in command_lines.commands(made) for word in (*c.argv, *c.env.values(), c.url, c.health)
    ]
    return " ".join([*map(str, found), *command_lines.files(made).values()])


REPLICAS = ("devices = [0] }", "replicas = 2 }")


def test_deployment_of_replicas_router_listens_where_they_do(tmp_path: Path) -> None:
    (router,) = [
        c for c in command_lines.commands(deployment_of(services(tmp_path, REPLICAS))) if c.kind == "router"
    ]
    assert value(router, "--host") == "127.0.0.1"
    assert value(router, "--prometheus-host") == "127.0.0.1"


def test_deployment_of_every_address_is_reached_by_loopback(tmp_path: Path) -> None:
    everywhere = ("port = 18500", 'port = 18500\nhost = "0.0.0.0"\nallow_anonymous = true')
    made = deployment_of(services(tmp_path, everywhere, REPLICAS))
    servers = [c for c in command_lines.commands(made) if c.kind in ("engine", "encoder", "router")]
    assert len(servers) == 5
    assert {value(c, "--host") for c in servers} == {"0.0.0.0"}
    assert "--allow-anonymous" in servers[0].argv
    assert "//0.0.0.0" not in words(made)
    assert "http://127.0.0.1:30000" in words(made)


def test_deployment_of_loopback_has_no_anonymous_callers(tmp_path: Path) -> None:
    assert "--allow-anonymous" not in words(deployment_of(services(tmp_path)))


def test_deployment_of_classes_and_workloads_has_one_scale(tmp_path: Path) -> None:
    """A class's priority decides; the workload, among equals. A class that is not named has priority 0."""
    batch = ('name = "standard"\nshare = 0.3', 'name = "standard"\nshare = 0.3\npriority = -1')
    late = (
        'name = "tts"\nllm = "small"\nworkload = "offline"',
        'name = "tts"\nllm = "small"\nslo = { ttft_s = 1.0 }',
    )

    def order(*changes: tuple[str, str]) -> list[str]:
        routes = json.loads(command_lines.files(deployment_of(services(tmp_path, *changes)))["routes.json"])
        return sorted(routes, key=lambda name: routes[name]["priority"])

    assert order()[0] == "chat-vlm-pro/picture"
    assert order()[-1] == "tts/answer"
    assert order(batch)[-1] == "chat-vlm/text"
    routes = json.loads(command_lines.files(deployment_of(services(tmp_path, late)))["routes.json"])
    assert routes["tts/answer"]["priority"] == routes["chat-vlm/text"]["priority"]


def test_deployment_of_engine_writes_for_its_most_urgent_app(tmp_path: Path) -> None:
    """An application without a class comes before one of a class below 0."""
    batch = ('name = "standard"\nshare = 0.3', 'name = "standard"\nshare = 0.3\npriority = -1')
    found = command_lines.commands(deployment_of(services(tmp_path, batch)))
    assert value(next(c for c in found if c.group == "small"), "--cornplug-app") == "tts"


def test_deployment_of_unsized_store_takes_a_share_of_memory(tmp_path: Path) -> None:
    store, *_ = command_lines.commands(deployment_of(services(tmp_path, ("store_gib = 2.0", ""))))
    assert "--size" not in store.argv
    assert "--cornplug-store" in words(deployment_of(services(tmp_path, ("store_gib = 2.0", ""))))


def test_deployment_of_store_size_with_unit_is_that_size(tmp_path: Path) -> None:
    store, *_ = command_lines.commands(
        deployment_of(services(tmp_path, ("store_gib = 2.0", 'store_gib = "64GiB"')))
    )
    assert value(store, "--size") == "64GiB"


def test_deployment_of_saved_file_is_read_again(tmp_path: Path) -> None:
    made = deployment_of(services(tmp_path))
    made.save(tmp_path / "plan.json")
    assert Deployment.load(tmp_path / "plan.json") == made
