"""Flags of a launched store: those of `cornplug serve-store` that a launch does not say itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornplug import config
from cornplug.apps import deployment_of
from cornplug.apps.launch_checks import STORE_FLAGS
from cornplug.errors import ConfigError
from cornplug.planner.launch.command_lines import commands
from cornplug.planner.plan import Deployment
from cornplug.store.daemon.main import store_parser

from .services import services


def store_flags(folder: Path, *flags: str) -> Deployment:
    """The deployment of the services with these flags."""
    written = ", ".join(f"'{flag}'" for flag in flags)
    return deployment_of(services(folder, ("store_gib = 2.0", f"store_gib = 2.0\nstore_flags = [{written}]")))


def test_store_flags_reach_the_launched_store(tmp_path: Path) -> None:
    flags = ("--far", "file:///shared", "--disk=/nvme", "--disk-size", "4GiB", "--metrics", "9464", "--clamp")
    store = next(c for c in commands(store_flags(tmp_path, *flags)) if c.kind == "store")
    assert store.argv[-len(flags) :] == flags
    options = store_parser(config.StoreConfig()).parse_args(list(store.argv[2:]))
    assert (options.far, options.disk, options.size) == (["file:///shared"], Path("/nvme"), 2 << 30)


def test_store_flags_outlive_a_plan_file(tmp_path: Path) -> None:
    plan = store_flags(tmp_path, "--clamp")
    plan.save(tmp_path / "plan.json")
    assert Deployment.load(tmp_path / "plan.json").store_flags == ["--clamp"]


@pytest.mark.parametrize(
    ("flags", "problem", "remedy"),
    [
        (("--size", "1GiB"), "flag '--size' is not allowed for a launched store", "Known: --far"),
        (("--fra", "file:///x"), "flag '--fra' is not allowed", "Did you mean '--far'?"),
        (("--quarantine", "5"), "flag '--quarantine' is not allowed", "Did you mean '--quarantine-s'?"),
        (("-h",), "flag '-h' is not allowed", "Known: --far"),
        (("--far",), "expected one argument", "serve-store --help"),
        (("9464",), "'9464' does not belong to a flag", "serve-store --help"),
        (("--disk-size", "much"), "'much' is not a size: write 64GiB", "serve-store --help"),
        (("--metrics", "here"), "'here' is not an address", "127.0.0.1:9464"),
    ],
)
def test_store_flags_wrong_one_is_an_error_with_its_line(
    tmp_path: Path, flags: tuple[str, ...], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        store_flags(tmp_path, *flags)
    assert "services.toml:6 launch.store_flags: " in str(caught.value)
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


def test_store_flags_allowed_are_flags_of_the_store() -> None:
    known = {flag for action in store_parser(config.StoreConfig())._actions for flag in action.option_strings}
    assert set(STORE_FLAGS) <= known


def test_store_flags_launched_engine_starts_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [c for c in commands(store_flags(tmp_path)) if c.kind == "engine"]
    assert {c.group for c in engines} == {"small", "large"}
    for engine in engines:
        with monkeypatch.context() as its:
            for name, value in engine.env.items():
                if name != "CORNPLUG_CONFIG":  # in the run folder, which is not there yet
                    its.setenv(name, value)
            assert config.load().store.autostart is False
