"""Each harmless setting of SGLang is in the run of tests/harmless_settings/sglang.py, or has a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harmless_settings import sglang, unexplained
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang.srt.environ import EnvField, Envs
from sglang.srt.mem_cache import host_memory
from sglang.srt.server_args import ServerArgs, prepare_server_args

from cornplug.sglang_hooks.kv import exclusions
from cornplug.sglang_hooks.model.environment import ENVIRONMENT
from cornplug.sglang_hooks.model.model_config import describe
from cornplug.sglang_hooks.model.server_args_fields import SERVER_ARGS
from devkit import checkpoints
from devkit.sglang_engine import _CPU_DEFAULTS, _DEFAULTS

FIELDS = [field.name for field in msgspec.structs.fields(ServerArgs)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and the folder that the run's settings name."""
    folder = tmp_path_factory.mktemp("harmless")
    checkpoints.qwen2_vl(folder / "given" / "tokenizer")
    return checkpoints.qwen2_vl(folder / "model"), folder / "given"


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment is restored, to which SGLang adds variables, and the host has memory for HiCache."""
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: 64 << 30)
    before = dict(os.environ)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def _parsed(model: Path, flags: list[str]) -> ServerArgs:
    """The settings as SGLang's parser reads them from a server's command line."""
    given = {flag for flag in flags if flag.startswith("--")}
    words = ["--model-path", str(model), "--served-model-name", "model", *flags]
    for flag, value in {**_DEFAULTS, **_CPU_DEFAULTS}.items():
        if flag not in given:
            words += [flag] if value is None else [flag, value]
    return prepare_server_args(words)


def test_harmless_fields_are_in_run_or_have_a_reason(folders: tuple[Path, Path], as_before: Any) -> None:
    model, given = folders
    plain, run = _parsed(model, []), _parsed(model, sglang.SERVER.arguments(given))
    in_run = {name for name in FIELDS if getattr(run, name) != getattr(plain, name)}
    assert unexplained(SERVER_ARGS.harmless, in_run, sglang.FIELDS, listed=SERVER_ARGS.harmless) == {}


def test_harmless_variables_are_in_run_or_have_a_reason(folders: tuple[Path, Path]) -> None:
    in_run = sglang.SERVER.environment(folders[1])
    harmless = ENVIRONMENT.harmless
    assert unexplained(harmless, in_run, sglang.VARIABLES, listed=harmless) == {}


def test_run_sets_variables_to_other_values(
    folders: tuple[Path, Path], as_before: pytest.MonkeyPatch
) -> None:
    known = {name: field for name, field in vars(Envs).items() if isinstance(field, EnvField)}
    made = sglang.SERVER.environment(folders[1])
    for name, value in made.items():
        as_before.setenv(name, value)
    same = [name for name in made if name in known and known[name].get() == known[name]._resolve_default()]
    assert same == []


def test_run_is_shared_under_the_keys_of_plain_server(
    folders: tuple[Path, Path], as_before: pytest.MonkeyPatch
) -> None:
    model, given = folders

    def keys(flags: list[str]) -> Any:
        args = _parsed(model, flags)
        args.resolve_once()
        assert exclusions.exclusion_reason(args, page_tokens=64) == ""
        found = describe(resolved_view(args), model_config_of(args))
        return found.overrides, found.kv_identity()

    expected = keys([])
    for name, value in sglang.SERVER.environment(given).items():
        as_before.setenv(name, value)
    assert keys(sglang.SERVER.arguments(given)) == expected
