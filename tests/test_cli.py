"""The table of commands, and what a user sees when one cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from cornplug import __version__, cli
from cornplug.errors import ConfigError
from devkit import checkpoints

LIGHT = """
import sys
import cornplug.cli, cornplug.checkpoints.checkpoint, cornplug.store.client
import cornplug.encoder_service.client.sync_client
heavy = {"torch", "transformers", "vllm", "fastapi"} & sys.modules.keys()
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put a command `probe` into the table, whose module holds the given source."""

    def add(source: str) -> None:
        (tmp_path / "cornplug_cli_probe.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "cornplug_cli_probe", raising=False)
        monkeypatch.setattr(cli, "COMMANDS", {"probe": cli.CliCommand("cornplug_cli_probe:main", "")})

    return add


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_cli_every_target_is_importable(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    assert callable(getattr(import_module(module), function))


def test_version_is_the_package_version() -> None:
    out = subprocess.run([sys.executable, "-m", "cornplug.cli", "--version"], capture_output=True, text=True)
    assert (out.returncode, out.stdout.strip()) == (0, f"cornplug {__version__}")


def test_cli_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_cli_unknown_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve"])
    assert exit_.value.code == 2
    assert "serve-store" in capsys.readouterr().err


def test_cli_arguments_and_status_pass_through(
    command: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command("def main(argv):\n    print(argv)\n    return 7\n")
    assert cli.main(["probe", "--model", "a", "--help", "--", "-x"]) == 7
    assert capsys.readouterr().out.strip() == "['--model', 'a', '--help', '--', '-x']"


def test_cli_cornplug_error_is_one_line_and_exits_with_2(
    command: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        "from cornplug.errors import ConfigError\n"
        "def main(argv):\n    raise ConfigError('store.size_bytes', 'too big', 'Take less.')\n"
    )
    assert cli.main(["probe"]) == 2
    said = str(ConfigError("store.size_bytes", "too big", "Take less."))
    assert capsys.readouterr().err == f"cornplug probe: {said}\n"


def test_cli_other_error_is_not_hidden(command: Callable[[str], None]) -> None:
    command("def main(argv):\n    raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_cli_missing_extra_names_the_remedy(
    command: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command("import fastapi.responses\n")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert cli.main(["probe"]) == 2
    assert "pip install 'cornplug[encoder]'" in capsys.readouterr().err


def test_cli_missing_module_of_no_extra_is_not_hidden(command: Callable[[str], None]) -> None:
    command("import cornplug_no_such_module\n")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


def test_cli_torch_is_loaded_by_commands_that_need_it_only() -> None:
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_cli_fingerprint_names_parts_that_two_models_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    checkpoints.llava(a, tower_seed=5, llm_seed=1)
    checkpoints.llava(b, tower_seed=5, llm_seed=2)
    assert cli.main(["fingerprint", "--json", "--dtype", "float32", str(a), str(b)]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert one["family"] == two["family"] == "llava"
    assert one["tower"] == two["tower"]
    assert one["language_model"] != two["language_model"]
    assert len(bytes.fromhex(one["identity"])) == 32

    assert cli.main(["fingerprint", str(a), str(b)]) == 0
    assert f"same tower ({one['tower'][:12]}): {a}, {b}" in capsys.readouterr().out


def test_cli_fingerprint_of_no_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fingerprint", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
