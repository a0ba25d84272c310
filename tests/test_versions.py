"""An engine's versions are said alike wherever they are said: CONTRIBUTING's recipe names these places."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from cornplug.commands.engine_checks import SGLANG, VLLM, CheckedEngine

# A scratch copy of the checkout, where a test follows the recipe.
TREE = Path(os.environ.get("CORNPLUG_TEST_TREE", Path(__file__).parents[1]))
ENGINES = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)


def pinned(engine: CheckedEngine) -> str:
    """The release that script/setup installs."""
    found = re.search(rf"\b{engine.name.upper()}=(\S+)", (TREE / "script" / "setup").read_text())
    assert found is not None
    return found[1]


@ENGINES
def test_versions_extra_installs_the_tested_range(engine: CheckedEngine) -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert f"{engine.name}{engine.supported}" in project["optional-dependencies"][engine.name]


@ENGINES
def test_versions_set_up_installs_a_tested_release(engine: CheckedEngine) -> None:
    assert pinned(engine) in engine.supported


@ENGINES
def test_readme_names_the_release_that_the_tests_run_on(engine: CheckedEngine) -> None:
    named = re.findall(rf"{engine.label} (\d+(?:\.\d+)+)", (TREE / "README.md").read_text())
    assert named
    assert all(pinned(engine).startswith(version) for version in named)
