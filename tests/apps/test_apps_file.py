"""Apps files: TOML to Python and back, their schema, and the words about bad ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from expected_errors import expect_error
from jsonschema import Draft202012Validator

from cornplug.apps import (
    Application,
    AppsFile,
    Component,
    ComponentResources,
    RequestSpec,
    Slo,
)
from cornplug.errors import ConfigError

from .services import TEXT, services, written


def test_apps_file_written_again_is_the_same(tmp_path: Path) -> None:
    file = services(tmp_path)
    (tmp_path / "again.toml").write_text(file.to_toml())
    assert AppsFile.read(tmp_path / "again.toml") == file


def test_apps_file_of_python_is_the_file_of_toml(tmp_path: Path) -> None:
    made = AppsFile(
        name="one",
        components=[
            Component(name="m", kind="llm", model="org/m", resources=ComponentResources(devices=[0]))
        ],
        applications=[
            Application(
                name="chat", llm="m", slo=Slo(ttft_s=1.0), requests=[RequestSpec(name="text", rate=2.0)]
            )
        ],
    ).check()
    (tmp_path / "one.toml").write_text(made.to_toml())
    assert AppsFile.read(tmp_path / "one.toml").to_toml() == made.to_toml()


def test_apps_file_check_names_the_field_of_python_objects() -> None:
    made = AppsFile(
        components=[Component(name="m", kind="llm", model="org/m")],
        applications=[
            Application(
                name="chat", llm="m", slo=Slo(ttft_s=1.0), requests=[RequestSpec(name="text", rate=2.0)]
            )
        ],
    )
    with expect_error(ConfigError, field="applications[0].llm", match="'m'"):
        made.check()


def test_apps_file_schema_takes_the_file_without_a_pool(tmp_path: Path) -> None:
    validator = Draft202012Validator(AppsFile.schema_of_file())
    assert not list(validator.iter_errors(tomllib.loads(TEXT)))
    wrong = TEXT.replace('system_prompt = "You see."', "system_prompt = 3")
    assert not validator.is_valid(tomllib.loads(wrong))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'tp = [2]\nresources = { devices = [1, 2], flags',
            'tp = [2]\nresources = { devices = [1], flags',
            r"services.toml:\d+ components\[1\].resources.devices: 1 devices",
        ),
        (
            "devices = [3]",
            "devices = [0]",
            r"components\[2\].resources.devices: .*1.5 of GPU 0. .*shares = \[0.5\]",
        ),
        (
            'command = ["python", "speech.py", "--port", "{port}"]',
            "command = []",
            r"components\[4\].resources.command: missing",
        ),
        (
            'kind = "generator"',
            'kind = "generator"\nserver = "vllm-omni"\nmodel = "org/speech"',
            r"components\[4\].resources.command: .*server = 'vllm-omni'",
        ),
        (
            'kind = "generator"\n\n[components.resources]\ndevice = "cpu"\ndevices = [0]\n'
            'command = ["python", "speech.py", "--port", "{port}"]\nhealth = "/ok"',
            'kind = "generator"\nserver = "vllm-omni"\nresources = { device = "cpu", devices = [0] }',
            r"components\[4\].model: ",
        ),
        ('model = "org/small"\nengines', "engines", r"components\[0\].model: "),
        ('resources = { devices = [0] }', "", r"applications\[0\].llm: 'small'"),
        ('qos = "premium"', 'qos = "premum"', r"applications\[1\].qos: .*'premium'"),
        (
            'workload = "offline"',
            'workload = "offline"\nroutes = [{ request = "anser", path = ["small"] }]',
            r"applications\[2\].routes\[0\].request: .*'anser'.*'answer'",
        ),
        (
            'workload = "offline"',
            'workload = "offline"\nroutes = [{ request = "answer", path = ["speech", "small"] }]',
            r'routes\[0\].path: .*\["small", "speech"\]',
        ),
        (
            'workload = "offline"',
            'workload = "offline"\nroutes = [{ request = "answer", path = ["small", "large"] }]',
            r"routes\[0\].path: 'large'",
        ),
        (
            'workload = "offline"',
            'workload = "offline"\nroutes = [{ request = "answer", path = ["speech"] }]',
            r"routes\[0\].path: the LLM 'small'",
        ),
        (
            "share = 0.25, priority",
            "share = 0.25, ceiling = 0.1, priority",
            r"applications\[0\].namespace: share 0.25.*ceiling 0.1",
        ),
        (
            "share = 0.25, priority",
            "share = 0.25, pinned = true, priority",
            r"applications\[0\].namespace: pinned",
        ),
        ("store_gib = 2.0", 'store_gib = "2 gigs"', r"launch.store_gib: '2 gigs'"),
        ("port = 18500", 'host = "::"', r"launch.host: '::'"),
        ("share = 0.3", "share = 0.6", r"qos: .*1.1"),
        ('tenant = "acme"', 'tenant = "a/b"', r"applications\[1\].tenant: \"a/b\""),
        (
            "devices = [0] }",
            "devices = [0], port = 18500 }\n",
            None,
        ),
    ],
)  # fmt: skip
def test_apps_file_with_a_fault_names_field_and_remedy(
    tmp_path: Path, old: str, new: str, said: str | None
) -> None:
    path = written(tmp_path, (old, new))
    if said is None:
        assert AppsFile.read(path).components[0].resources is not None
        return
    with pytest.raises(ConfigError, match=said):
        AppsFile.read(path)


def test_apps_file_two_components_of_one_port_are_refused(tmp_path: Path) -> None:
    one = ("devices = [0] }", "devices = [0], port = 9000, replicas = 1 }")
    other = ("devices = [3] }", "devices = [3], port = 9000 }")
    with pytest.raises(ConfigError, match=r"components\[2\].resources.port: .*9000.*small"):
        AppsFile.read(written(tmp_path, one, other))
