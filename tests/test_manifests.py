"""Dockerfiles, Compose, Helm chart and Kustomize of deploy/: by schemas and linters, and against the code."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from deploy_facts import TREE, constant, pins, routes, series, unknown_flags
from dockerfile_parse import DockerfileParser
from expected_errors import expect_error

from cornplug import __version__
from cornplug.commands import top
from cornplug.config import EncoderConfig, load
from cornplug.encoder_service.fair_queue import MAX_WAITING
from cornplug.errors import ConfigError, StoreError
from cornplug.private_paths import secret_problem
from cornplug.processes import responds_ok
from cornplug.settings import parse_byte_size
from cornplug.sglang_hooks import compat as sglang_compat
from cornplug.store.arena import MemoryLimit, choose_store_size
from cornplug.store.daemon.metrics_endpoint import MetricsEndpoint
from cornplug.vllm_connector import compat as vllm_compat

helm_python = pytest.importorskip("helm_python")  # its wheels are for x86-64
import render_manifests  # noqa: E402

DEPLOY = TREE / "deploy"
DOCKER = {name: DEPLOY / "docker" / f"{name}.Dockerfile" for name in ("store", "encoder", "vllm", "sglang")}
KUBERNETES = ("1.30", kubernetes_validate.latest_version())
KEY = "sha256:" + 64 * "0"
ALL_ON = {
    "image": {"registry": "registry.example.org", "pullSecrets": [{"name": "registry"}]},
    "config": f'[qos.classes.chat]\ndeadline_s = 2.0\napi_keys = ["{KEY}"]\n',
    "store": {"far": ["valkey://10.0.0.5:6379/0"], "priorityClassName": "system-node-critical"},
    "encoder": {"gpus": 0, "requireKey": False, "autoscaling": {"enabled": True}},
    "engines": {"chat": {"autoscaling": {"enabled": True}, "args": ["--max-model-len=4096"]}},
    "network": {"storeEgress": [{"ports": [{"port": 6379}]}]},
}
SCALED = {"enabled": True, "maxReplicas": 2, "predictedSeconds": 2}
ENCODER_DRAIN_S = math.ceil(
    EncoderConfig().drain_s + constant("cornplug/encoder_service/server.py", "_MIN_REFUSAL_S")
)


@functools.cache
def rendered(kind: str) -> tuple[dict[str, Any], ...]:
    """The objects of the chart with its defaults or with everything on, or of Kustomize's example."""
    if kind == "overlay":
        command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", "overlays/example"]
        made = subprocess.run(
            command, cwd=DEPLOY / "kustomize", check=True, capture_output=True, text=True, timeout=60
        )
        return tuple(yaml.safe_load_all(made.stdout))
    files = render_manifests.render({"defaults": None, "all on": ALL_ON}[kind])
    return tuple(one for objects in files.values() for one in objects)


KINDS = ("defaults", "all on", "overlay")


def of_kind(kind: str, what: str) -> Iterator[dict[str, Any]]:
    return (one for one in rendered(kind) if one["kind"] == what)


class Process(NamedTuple):
    """A container of a pod that runs one of the four images."""

    name: str
    pod: dict[str, Any]
    container: dict[str, Any]
    labels: dict[str, str]


def processes(kind: str) -> list[Process]:
    """One of each pod that the objects make."""
    found = []
    for workload in (*of_kind(kind, "DaemonSet"), *of_kind(kind, "Deployment")):
        template = workload["spec"]["template"]
        (container,) = template["spec"]["containers"]
        name = re.sub(r".*cornplug-(\w+):.*", r"\1", container["image"])
        found.append(Process(name, template["spec"], container, template["metadata"]["labels"]))
    assert {one.name for one in found} >= {"store", "encoder", "vllm"}
    return found


@functools.cache
def dockerfile(name: str) -> DockerfileParser:
    return DockerfileParser(str(DOCKER[name]))


def instructions(name: str, word: str) -> list[str]:
    """Values of an instruction in the final stage."""
    all_of_them = dockerfile(name).structure
    last = max(i for i, one in enumerate(all_of_them) if one["instruction"] == "FROM")
    return [one["value"] for one in all_of_them[last:] if one["instruction"] == word]


def argument(name: str, what: str) -> str:
    """The default of an ARG."""
    (value,) = re.findall(rf"^ARG {what}=(\S+)$", DOCKER[name].read_text(), re.MULTILINE)
    return str(value)


def healthcheck(name: str) -> list[str]:
    (check,) = instructions(name, "HEALTHCHECK")
    words: list[str] = json.loads(check[check.index("[") :])
    return words


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "from a secret") for one in container["env"]}


# -- Docker --


def test_dockerfile_linted_has_no_fault() -> None:
    tool = str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run(
        [tool, "--no-color", *map(str, DOCKER.values())], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKER)
def test_dockerfile_process_is_a_user_without_secrets(name: str) -> None:
    (user,) = instructions(name, "USER")
    uids = {one for one in instructions(name, "ARG") if one.startswith("UID=")}
    assert (user, uids) == (
        "${UID}:${UID}",
        {f"UID={processes('defaults')[0].pod['securityContext']['runAsUser']}"},
    )
    copied = [one["value"] for one in dockerfile(name).structure if one["instruction"] in ("COPY", "ADD")]
    assert set(copied) <= {"dist/*.whl /wheel/", "--from=build /opt/cornplug /opt/cornplug"}
    env = dict(re.findall(r"(\w+)=(\S+)", " ".join(instructions(name, "ENV"))))
    settings = {key for key in env if key.startswith("CORNPLUG_")}
    assert env.keys() - settings <= {"PATH", "HOME", "PYTHONUNBUFFERED", "HF_HUB_OFFLINE"}
    load(environ=env)
    assert not any(one.endswith("KEY") for one in settings), "keys are no part of an image"
    allowed = [line for line in (TREE / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert allowed == ["!dist", "!dist/*.whl"]


@pytest.mark.parametrize(("name", "compat"), [("vllm", vllm_compat), ("sglang", sglang_compat)])
def test_dockerfile_engine_base_is_the_tested_release(name: str, compat: Any) -> None:
    version = argument(name, name.upper())
    assert version == pins()[name]
    assert version in compat.SUPPORTED_VERSIONS
    repository = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}[name]
    assert dockerfile(name).baseimage == f"{repository}:v{version}"


@pytest.mark.parametrize("name", DOCKER)
def test_dockerfile_extras_are_those_of_the_package(name: str) -> None:
    extras = re.findall(r"\$\{wheel\}\[([\w,-]+)\]", DOCKER[name].read_text())
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert extras
    assert set(extras[0].split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", DOCKER)
def test_dockerfile_healthcheck_asks_what_the_server_answers(name: str) -> None:
    words = healthcheck(name)
    if name == "store":
        assert words[:2] == ["cornplug", "top"]
        with pytest.raises(StoreError):  # its flags are right, and without a store it fails
            top.main(words[2:])
        return
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", words[-1])
    assert found is not None
    assert found[2] in routes(name)
    assert instructions(name, "EXPOSE") == [found[1]]


# -- Compose --


def test_compose_file_meets_the_specification() -> None:
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = jsonschema.Draft202012Validator(json.loads((folder / "compose-spec.json").read_text()))
    assert list(schema.iter_errors(compose())) == []
    wrong = compose()
    wrong["services"]["store"]["stop_grace"] = "10s"
    assert any("stop_grace" in error.message for error in schema.iter_errors(wrong))


@pytest.mark.parametrize("name", DOCKER)
def test_compose_service_has_the_image_user_secret_and_flags_of_the_code(name: str) -> None:
    service = compose()["services"][name]
    assert service["image"] == f"cornplug-{name}:{__version__}"
    assert service["build"]["dockerfile"] == str(DOCKER[name].relative_to(TREE))
    assert service["user"] == "10001:10001" == f"{(uid := argument(name, 'UID'))}:{uid}"
    assert service["secrets"] == ["cornplug"]
    env = dict(re.findall(r"(\w+)=(\S+)", " ".join(instructions(name, "ENV"))))
    assert env["CORNPLUG_STORE_SECRET_FILE"] == "/run/secrets/cornplug"
    assert "run:/run/cornplug" in service["volumes"]
    assert unknown_flags(name, service["command"]) == []
    waits = {"store": (), "encoder": ("store",)}.get(name, ("store", "encoder"))
    assert service.get("depends_on", {}) == {one: {"condition": "service_healthy"} for one in waits}


def test_compose_stop_grace_is_longer_than_each_drain() -> None:
    services = compose()["services"]
    grace_s = {name: int(one["stop_grace_period"].removesuffix("s")) for name, one in services.items()}
    words = services["vllm"]["command"]
    assert grace_s["encoder"] > ENCODER_DRAIN_S
    assert grace_s["vllm"] > int(words[words.index("--shutdown-timeout") + 1])


# -- Kubernetes --


def test_chart_lint_finds_no_fault() -> None:
    found = helm_python.lint(str(render_manifests.CHART))
    assert found["total_charts_linted"] == 1
    assert [one for one in found["messages"] if one["severity"] > 1] == found["errors"] == []


def test_chart_version_is_the_package_s_and_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chart = yaml.safe_load((render_manifests.CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    monkeypatch.setattr(render_manifests, "__version__", "9.9.9")
    texts = [render_manifests.numbered(render_manifests.CHART / "Chart.yaml")]
    texts.append(render_manifests.numbered(render_manifests.COMPOSE))
    assert [text.count("9.9.9") for text in texts] == [2, 4]
    assert yaml.safe_load(texts[1]).keys() == compose().keys()


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", KINDS)
def test_manifest_object_meets_the_schema_of_kubernetes(kind: str, version: str) -> None:
    for one in rendered(kind):
        kubernetes_validate.validate(one, version, strict=True)
    wrong = {**next(of_kind(kind, "DaemonSet")), "spec": {"tempalte": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifest_without_encoder_and_policies_names_neither(version: str) -> None:
    off = {
        "encoder": {"enabled": False},
        "network": {"enabled": False},
        "adapterRules": False,
        "models": {"persistentVolumeClaim": None, "hostPath": {"path": "/srv/models"}},
    }
    files = render_manifests.render(off)
    assert files.keys() == {"store.yaml", "engines.yaml"}
    assert "encoder" not in json.dumps(files).lower()
    for one in (one for objects in files.values() for one in objects):
        kubernetes_validate.validate(one, version, strict=True)


def test_manifest_values_of_the_page_are_rendered() -> None:
    page = (TREE / "docs" / "deploy-many-hosts.md").read_text()
    (block,) = re.findall(r"```yaml\n(# values\.yaml;.*?)```", page, re.DOTALL)
    objects = render_manifests.render(yaml.safe_load(block))["engines.yaml"]
    (engine,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example.org/cornplug-vllm:{__version__}"
    assert engine["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stroe": {}}, "stroe"),
        ({"user": 0}, "/user"),
        ({"store": {"sizeGiB": "64GiB"}}, "/store/sizeGiB"),
        ({"network": {"clients": []}}, "/network/clients"),
        ({"engines": {"chat": {"kind": "ollama"}}}, "/engines/chat"),
        ({"engines": {"chat": {"autoscaling": SCALED}}}, "write [qos.classes.NAME] into config"),
        ({"engines": {"agents": {"autoscaling": SCALED}}}, "agents.autoscaling: cornplug measures"),
    ],
)  # fmt: skip
def test_chart_wrong_value_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(said)):
        render_manifests.render(values)


def test_kustomize_base_is_as_the_chart_renders_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render_manifests.main(["--check"]) == 0
    copy = tmp_path / "deploy"
    shutil.copytree(render_manifests.BASE, copy)
    monkeypatch.setattr(render_manifests, "BASE", copy)
    monkeypatch.setattr(render_manifests, "TREE", tmp_path)
    (copy / "store.yaml").write_text((copy / "store.yaml").read_text().replace("64GiB", "32GiB"))
    (copy / "old.yaml").touch()
    assert render_manifests.main(["--check"]) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "deploy/old.yaml",
        "deploy/store.yaml",
    ]
    assert render_manifests.main([]) == 0
    assert render_manifests.main(["--check"]) == 0


def test_kustomize_example_replaces_each_placeholder() -> None:
    assert "MODEL" not in json.dumps(rendered("overlay"))
    for one in processes("overlay"):
        assert one.container["image"] == f"registry.example.org/cornplug-{one.name}:{__version__}"


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_container_has_flags_and_settings_of_the_code(kind: str) -> None:
    for one in processes(kind):
        assert unknown_flags(one.name, one.container["args"]) == [], one.name
        env = env_of(one.container)
        config = load(environ={**env, "CORNPLUG_CONFIG": ""})
        assert all(name.startswith("CORNPLUG_") for name in env)
        assert str(config.store.socket) == "/run/cornplug/store.sock"
        if one.name not in ("store", "encoder"):
            assert config.encoder.engine_urls == ("http://cornplug-encoder:8750",)
            assert not config.store.autostart
        for name in [word.partition("=")[2] for word in one.container["args"] if "--middleware" in word]:
            module, _, attribute = name.rpartition(".")
            assert callable(getattr(importlib.import_module(module), attribute))
    assert unknown_flags("vllm", ["--kv-conector=cornplug"]) == ["--kv-conector"]


def test_manifest_pods_have_no_service_links_as_these_are_settings() -> None:
    names = {one["metadata"]["name"] for one in of_kind("defaults", "Service")}
    assert "cornplug-encoder" in names
    with expect_error(ConfigError, field="encoder.port"):
        load(environ={"CORNPLUG_ENCODER_PORT": "tcp://10.0.0.1:8750"})
    assert [one.pod["enableServiceLinks"] for one in processes("all on")] == [False] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_grace_is_longer_than_the_drain(kind: str) -> None:
    for one in processes(kind):
        args, pause_s = one.container["args"], 0
        if one.name != "store":
            pause_s = one.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        flags = dict(word.split("=", 1) for word in args if "=" in word)
        drains_s = {"encoder": ENCODER_DRAIN_S, "vllm": int(flags.get("--shutdown-timeout", 0))}
        assert one.pod["terminationGracePeriodSeconds"] > pause_s + drains_s.get(one.name, 0)
        if one.name == "encoder":
            assert float(env_of(one.container)["CORNPLUG_ENCODER_DRAIN_S"]) == EncoderConfig().drain_s


def store_answers(path: str) -> bool:
    """Whether the store's HTTP server has the path."""
    endpoint = MetricsEndpoint("127.0.0.1:0")
    try:
        return responds_ok(f"http://127.0.0.1:{endpoint.port}{path}")
    finally:
        endpoint.close()


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_probe_asks_what_the_server_answers(kind: str) -> None:
    for one in processes(kind):
        ports = {port["name"] for port in one.container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = one.container[probe]
            if "exec" in asked:
                # A new process is late on a busy node: for want of one no store is ended.
                assert (one.name, probe == "livenessProbe") == ("store", False)
                assert asked["exec"]["command"] == healthcheck("store")
                continue
            assert asked["httpGet"]["port"] in ports
            path = asked["httpGet"]["path"]
            assert store_answers(path) if one.name == "store" else path in routes(one.name)
        if one.name == "encoder":
            assert one.container["readinessProbe"]["httpGet"]["path"] == "/ready"
    for file in ("/helth", "/healthz"):
        assert file not in routes("encoder") | routes("vllm") | routes("sglang")


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_pod_is_one_user_without_privileges(kind: str) -> None:
    everyone = processes(kind)
    assert len({one.pod["securityContext"]["runAsUser"] for one in everyone}) == 1
    for one in everyone:
        pod, container = one.pod, one.container
        assert pod["securityContext"]["runAsNonRoot"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
        for init in pod.get("initContainers", ()):
            assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["run"]["hostPath"]["path"] == "/run/cornplug"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        mode = volumes["secret"]["secret"]["defaultMode"]
        about: Any = SimpleNamespace(st_uid=0, st_mode=mode)
        assert secret_problem(about) == ""
        assert mode & 0o040, "the pod's group reads it"
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()


@pytest.mark.parametrize("size_gib", [1, 14, 15, 64, 1000])
def test_chart_memory_limit_of_the_store_holds_its_size(size_gib: int) -> None:
    (store,) = render_manifests.render({"store": {"sizeGiB": size_gib}})["store.yaml"]
    (container,) = store["spec"]["template"]["spec"]["containers"]
    limit_bytes = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    size_bytes = parse_byte_size(container["args"][1])
    process_bytes = 512 << 20
    bound = MemoryLimit(limit_bytes, limit_bytes - process_bytes, "the pod's limit")
    assert choose_store_size(size_bytes, clamp=False, memory=bound) == size_bytes == size_gib << 30


def test_manifest_autoscaler_metric_is_the_code_s_and_has_a_rule() -> None:
    (rules,) = (one for one in of_kind("all on", "ConfigMap") if "config.yaml" in one["data"])
    served = {rule["name"]["as"]: rule for rule in yaml.safe_load(rules["data"]["config.yaml"])["rules"]}
    targets = {}
    for scaler in of_kind("all on", "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            targets[metric["pods"]["metric"]["name"]] = float(metric["pods"]["target"]["averageValue"])
    assert targets.keys() == served.keys()
    assert 0 < targets["cornplug_encoder_waiting"] < MAX_WAITING
    for name, rule in served.items():
        assert re.fullmatch(rule["name"]["matches"], name)
        filled = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        filled = filled.replace("<<.LabelMatchers>>", 'namespace="x",pod=~"a|b"')
        for query in (rule["seriesQuery"], filled):
            promql_parser.parse(query)
            assert set(re.findall(r"cornplug_\w+", query)) <= series().keys()
    assert load(environ={}).qos.classes == {}
    assert "chat" in tomllib.loads(ALL_ON["config"])["qos"]["classes"]  # type: ignore[arg-type]


def test_manifest_prometheus_jobs_find_the_ports_and_labels_of_the_pods() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    found = [{tuple(r["source_labels"]): r for r in job["relabel_configs"]} for job in jobs]
    part, name = (f"__meta_kubernetes_pod_label_app_kubernetes_io_{one}" for one in ("part_of", "name"))
    for rules in found:
        assert {r.get("target_label") for r in rules.values()} >= {"namespace", "pod"}
        for one in processes("defaults"):
            assert one.labels["app.kubernetes.io/part-of"] == rules[part,]["regex"]
    ports = {port["name"] for one in processes("defaults") for port in one.container["ports"]}
    assert set(found[0]["__meta_kubernetes_pod_container_port_name",]["regex"].split("|")) == ports
    assert [rules[name,]["regex"] for rules in found] == ["encoder", "encoder"]
    assert "authorization" in jobs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_network_policy_covers_each_pod_and_opens_its_ports_to_named_peers(kind: str) -> None:
    policies = list(of_kind(kind, "NetworkPolicy"))
    for one in processes(kind):
        mine = [p for p in policies if selects(p["spec"]["podSelector"], one.labels)]
        assert {way for p in mine for way in p["spec"]["policyTypes"]} == {"Ingress", "Egress"}
        rules = [rule for p in mine for rule in p["spec"].get("ingress", ())]
        assert {port["port"] for rule in rules for port in rule["ports"]} == {
            port["name"] for port in one.container["ports"]
        }
        assert all(rule["from"] and {} not in rule["from"] for rule in rules)
        engine = one.name in ("vllm", "sglang")
        goes = [
            to["podSelector"] for p in mine for r in p["spec"].get("egress", ()) for to in r.get("to", ())
        ]
        encoder = next(p.labels for p in processes(kind) if p.name == "encoder")
        assert any(selects(selector, encoder) for selector in goes) == engine


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes a pod."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(one["key"] in labels for one in selector.get("matchExpressions", ()))


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_service_and_disruption_budget_select_a_pod_each(kind: str) -> None:
    pods = [one.labels for one in processes(kind)]
    selectors = [{"matchLabels": one["spec"]["selector"]} for one in of_kind(kind, "Service")]
    selectors += [one["spec"]["selector"] for one in of_kind(kind, "PodDisruptionBudget")]
    assert selectors
    for selector in selectors:
        assert sum(selects(selector, labels) for labels in pods) == 1
