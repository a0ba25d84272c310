"""Python processes that cornplug starts read no module from the folder where the user happens to be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import cornplug
from cornplug.commands import engine_checks
from cornplug.planner.launch import launcher
from cornplug.store.far.client_process import _Client

from .store.conftest import eventually

PACKAGE = Path(cornplug.__file__).parent
SHADOWED = ("msgspec", "multiprocessing", "queue", "secrets", "signal", "socket", "struct", "threading")


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files of executed modules. The current folder has modules with usual names."""
    marks, here = tmp_path / "marks", tmp_path / "here"
    marks.mkdir()
    here.mkdir()
    for name in SHADOWED:
        (here / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w').close()\n")
    monkeypatch.chdir(here)
    return marks


@pytest.mark.parametrize("module", ["mooncake_client", "nixl_client"])
def test_far_client_reads_no_module_of_current_folder(marks: Path, module: str) -> None:
    client = _Client(f"cornplug.store.far.{module}", b"", {})
    # It ends by itself: its settings are malformed.
    eventually(lambda: client.has_exited)
    assert not list(marks.iterdir())


def test_doctor_probe_reads_no_module_of_current_folder(marks: Path) -> None:
    done = engine_checks._run("import queue, secrets; print('whole')", timeout_s=60)
    assert done.stdout.strip() == "whole", done.stderr
    assert not list(marks.iterdir())


def test_launched_python_reads_no_module_of_current_folder(
    marks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CORNPLUG_SGLANG_PYTHON", str(other))
    assert launcher.resolve_program(["python", "-m", "json.tool"]) == [str(other), "-P"]
    assert not list(marks.iterdir())
    assert "-P" in launcher.resolve_program(["cornplug", "encoder"])


# -- all others ----------------------------------------------------------------------------------

_STARTERS = frozenset(
    {
        *("ProcessPoolExecutor", "create_subprocess_exec", "create_subprocess_shell", "execv", "execve"),
        *("execvp", "get_context", "popen", "posix_spawn", "set_start_method", "spawnv", "system"),
    }
)
_MODULES = frozenset({"asyncio", "concurrent", "futures", "multiprocessing", "os", "pty"})
_NO_INTERPRETER = {
    "planner/launch/launcher.py": "`_find_python` returns it; `program` puts -P behind it",
}


def _commands(tree: ast.AST) -> Iterator[tuple[int, bool]]:
    """(line, whether -P follows) for each `sys.executable` that is not an argument of Path()."""
    plain = {id(arg) for call in ast.walk(tree) if _is_path(call) for arg in call.args}
    safe = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for word, following in zip(node.elts, node.elts[1:], strict=False):
                if isinstance(following, ast.Constant) and following.value == "-P":
                    safe.add(id(word))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "executable" and id(node) not in plain:
            yield node.lineno, id(node) in safe


def _is_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Path"


def _modules(words: Collection[str]) -> Iterator[tuple[str, ast.Module]]:
    """The modules that have one of these words."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if any(word in text for word in words):
            yield str(path.relative_to(PACKAGE)), ast.parse(text)


def test_every_python_child_has_safe_path() -> None:
    found = {
        f"{name}:{line}"
        for name, tree in _modules(["executable"])
        for line, safe in _commands(tree)
        if not safe and name not in _NO_INTERPRETER
    }
    assert not found, "start Python with -P: a file of the current folder could take a module's place"


def test_children_are_started_by_subprocess_only() -> None:
    """`multiprocessing` and others would start Python in ways that the test above does not see."""
    found = {
        f"{name}:{node.lineno} {node.attr}"
        for name, tree in _modules(_STARTERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _STARTERS
        if isinstance(node.value, ast.Name) and node.value.id in _MODULES
    }
    assert not found
