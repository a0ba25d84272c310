"""Each import contract of pyproject.toml reports a forbidden import that is planted for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]

# Contract -> (module, an import that the contract forbids there).
WRONG = {
    "Imports run downwards only": ("cornplug/store/messages.py", "import cornplug.planner.plan"),
    "The encoder service's rooms": (
        "cornplug/encoder_service/towers/base.py",
        "import cornplug.encoder_service.http.requests",
    ),
    "The planner's rooms": ("cornplug/planner/plan.py", "import cornplug.planner.report.formatting"),
    "No two rooms of one folder import each other": (
        "cornplug/vllm_connector/model/setting_verdicts.py",
        "import cornplug.vllm_connector.kv.scheduler",
    ),
    "vLLM is imported in its room only": ("cornplug/identity.py", "import vllm"),
    "SGLang is imported in its room only": ("cornplug/vllm_connector/stats.py", "import sglang"),
    "Engines see the encoder service's client side only": (
        "cornplug/vllm_connector/stats.py",
        "import cornplug.encoder_service.scheduling.admission",
    ),
    "No torch where a client, a store or the planner runs, not even through another module": (
        "cornplug/qos.py",
        "import torch",
    ),
    "Rooms without torch do not reach for the modules about tensors": (
        "cornplug/encoder_service/client/retry.py",
        "import cornplug.encoder_service.wire.tensors",
    ),
    "The planner stands alone": ("cornplug/planner/plan.py", "import cornplug.engine_common.load_policy"),
    "Nothing in the wheel needs what is not in it": ("cornplug/kv_page.py", "import devkit.photos"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of import-linter for a copy of the tree that contains all these imports."""
    scratch = tmp_path_factory.mktemp("house")
    for name in ("cornplug", "devkit"):
        shutil.copytree(TREE / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TREE / "pyproject.toml", scratch)
    for path, line in WRONG.values():
        file = scratch / path
        file.write_text(f"{file.read_text()}\n{line}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache", "--no-logo"],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(scratch), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("contract", WRONG)
def test_contract_reports_forbidden_import(planted: str, contract: str) -> None:
    words = " ".join(planted.split())
    assert f"{contract} BROKEN" in words


def test_every_contract_has_a_forbidden_import() -> None:
    names = re.findall(r'^name = "(.+)"$', (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(names) - {"cornplug"} == set(WRONG)
