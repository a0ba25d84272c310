"""Engine versions in the package's extras, in script/setup and in the code agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cornplug.commands.engine_checks import SGLANG, VLLM, CheckedEngine

TREE = Path(__file__).parents[1]


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_versions_of_extra_set_up_and_code_agree(engine: CheckedEngine) -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert f"{engine.name}{engine.supported}" in project["optional-dependencies"][engine.name]
    pinned = re.search(rf"\b{engine.name.upper()}=(\S+)", (TREE / "script" / "setup").read_text())
    assert pinned is not None
    assert pinned[1] in engine.supported
