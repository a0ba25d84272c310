"""Each harmless setting of vLLM is in a run of tests/harmless_settings/vllm.py, or has a reason."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harmless_settings import unexplained, vllm
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cornplug.engine_common.engine_config import default_values
from cornplug.identity import canonical_json
from cornplug.vllm_connector.model import model_config
from cornplug.vllm_connector.model.model_config import kv_identity, tower_identity
from cornplug.vllm_connector.model.model_fields import HARMLESS_VARIABLES
from devkit import checkpoints
from devkit.engines import _DEFAULTS

from .test_model_config import CLASSES, TABLES

RELEASE = importlib.metadata.version("vllm").rpartition(".")[0]
VARIABLES = {name for name in envs.environment_variables if HARMLESS_VARIABLES.fullmatch(name)}
_REVIEWED = (Path(__file__).parents[2] / "golden" / "vllm_variables.txt").read_text().split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and the folder that the runs' settings name."""
    folder = tmp_path_factory.mktemp("harmless")
    checkpoints.qwen2_vl(folder / "given" / "tokenizer")
    return checkpoints.qwen2_vl(folder / "model"), folder / "given"


def _config(model: Path, flags: list[str], environment: Mapping[str, str]) -> Any:
    """What vLLM resolves of a server's command line. It leaves this process's environment as it was."""
    defaults = [word for flag, value in _DEFAULTS.items() for word in (flag, value) if word is not None]
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args: argparse.Namespace = parser.parse_args(["serve", str(model), *defaults, *flags])
    args.model = args.model_tag
    before = dict(os.environ)
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", **environment})
    try:
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Any:
    return _config(folders[0], shlex.split(vllm.PLAIN), {})


@pytest.fixture(scope="module")
def resolved(folders: tuple[Path, Path]) -> Mapping[str, Any]:
    """Name of a run -> its VllmConfig."""
    model, given = folders
    return {
        name: _config(model, run.arguments(given), run.environment(given))
        for name, run in vllm.runs(RELEASE).items()
    }


def _parts(config: Any) -> Iterator[Any]:
    """The config and every part of it that has a table."""
    yield config
    for name, part in vars(config).items():
        if type(part).__name__ in TABLES and name not in TABLES[type(config).__name__].harmless:
            yield from _parts(part)


def _differing(config: Any, plain: Any) -> set[str]:
    """Harmless fields that the config has otherwise than the plain engine, as "Class.field"."""
    others = {type(part).__name__: part for part in _parts(plain)}
    found = set()
    for part in _parts(config):
        owner = type(part).__name__
        known = vars(others[owner]) if owner in others else default_values(type(part))
        for name in TABLES[owner].harmless.keys() & vars(part).keys():
            if repr(getattr(part, name)) != repr(known.get(name)):
                found.add(f"{owner}.{name}")
    return found


def test_harmless_fields_are_in_run_or_have_a_reason(plain: Any, resolved: Mapping[str, Any]) -> None:
    listed = {f"{tables.class_name}.{name}" for tables in TABLES.values() for name in tables.harmless}
    existing = {f"{n}.{one.name}" for n in TABLES for one in dataclasses.fields(CLASSES[n])}
    in_runs = {name for config in resolved.values() for name in _differing(config, plain)}
    assert unexplained(listed & existing, in_runs, vllm.FIELDS, listed=listed) == {}


def test_harmless_variables_are_in_run_or_have_a_reason(folders: tuple[Path, Path]) -> None:
    listed = {*VARIABLES, *filter(HARMLESS_VARIABLES.fullmatch, _REVIEWED)}
    in_runs = {name for run in vllm.runs(RELEASE).values() for name in run.environment(folders[1])}
    assert unexplained(VARIABLES, in_runs, vllm.VARIABLES, listed=listed) == {}


@pytest.mark.parametrize("name", vllm.runs(RELEASE))
def test_run_sets_variables_to_other_values(name: str, folders: tuple[Path, Path], monkeypatch: Any) -> None:
    made = vllm.runs(RELEASE)[name].environment(folders[1])
    for variable in (*made, "DO_NOT_TRACK"):
        monkeypatch.delenv(variable, raising=False)
    before = {variable: envs.environment_variables[variable]() for variable in made}
    for variable, value in made.items():
        monkeypatch.setenv(variable, value)
    after = {variable: envs.environment_variables[variable]() for variable in made}
    assert [variable for variable in made if after[variable] == before[variable]] == []


@pytest.mark.parametrize("name", vllm.runs(RELEASE))
def test_run_has_the_keys_of_plain_engine(
    name: str, plain: Any, resolved: Mapping[str, Any], folders: tuple[Path, Path], monkeypatch: Any
) -> None:
    # What is compared is settings, in each release: not whether the family was compared in it.
    monkeypatch.setattr(model_config, "validated_families", lambda *_: frozenset({"qwen2_vl"}))

    def keys(config: Any) -> tuple[Any, ...]:
        fingerprint, spec = kv_identity(config)
        return fingerprint, canonical_json(spec), tower_identity(config).identity

    expected = keys(plain)
    for variable, value in vllm.runs(RELEASE)[name].environment(folders[1]).items():
        monkeypatch.setenv(variable, value)
    assert keys(resolved[name]) == expected
