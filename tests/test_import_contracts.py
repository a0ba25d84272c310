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
    "Layers of the encoder service": (
        "cornplug/encoder_service/towers/base.py",
        "import cornplug.encoder_service.http.requests",
    ),
    "Layers of the encoder service's formats": (
        "cornplug/encoder_service/formats/messages.py",
        "import cornplug.encoder_service.formats.image",
    ),
    "Layers of the planner": ("cornplug/planner/plan.py", "import cornplug.planner.report.formatting"),
    "No two packages or modules of one folder import each other": (
        "cornplug/vllm_connector/model/setting_verdicts.py",
        "import cornplug.vllm_connector.kv.scheduler",
    ),
    "vLLM is imported in its plugin only": ("cornplug/identity.py", "import vllm"),
    "SGLang is imported in its plugin only": ("cornplug/vllm_connector/stats.py", "import sglang"),
    "Engines see the encoder service's client side only": (
        "cornplug/vllm_connector/stats.py",
        "import cornplug.encoder_service.admission",
    ),
    "No torch where a client, a store or the planner runs, not even through another module": (
        "cornplug/qos.py",
        "import torch",
    ),
    "Modules without torch do not import the modules about tensors": (
        "cornplug/encoder_service/client/retry.py",
        "import cornplug.encoder_service.formats.tensors",
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
