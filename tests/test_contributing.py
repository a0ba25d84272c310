"""CONTRIBUTING's recipes, followed on a scratch copy of the tree: each step does what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
PARTS = ("cornplug", "devkit", "script", "pyproject.toml", "README.md")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A copy of cornplug and of the files that name it. Run with -P: the checkout's own is in this folder."""
    for name in PARTS:
        copy = shutil.copytree if (TREE / name).is_dir() else shutil.copy
        copy(TREE / name, tmp_path / name)
    return tmp_path


def pytest_in(tree: Path, *args: str) -> tuple[int, str]:
    """(exit status, output) of these tests of ours against the scratch copy's cornplug."""
    env = {**os.environ, "PYTHONPATH": str(tree), "CORNPLUG_TEST_TREE": str(tree)}
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    done = subprocess.run(words, cwd=TREE, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_contributing_new_family_file_is_found_by_itself(scratch: Path) -> None:
    """Gemma 3's, taken away and written again; the line in test_towers compares it with transformers'."""
    line = ("tests/encoder_service/towers/test_towers.py", "-k", "embeddings_equal_transformers and gemma3")
    file = scratch / "cornplug" / "checkpoints" / "families" / "gemma3.py"
    text = file.read_text()
    file.unlink()
    status, said = pytest_in(scratch, *line)
    assert status == 1
    assert "gemma3" in said
    file.write_text(text)
    status, said = pytest_in(scratch, *line)
    assert status == 0, said


def test_engine_family_is_shared_once_compared_there(scratch: Path) -> None:
    """The list that script/docs writes from results of tests/integration/test_families.py."""
    listed = scratch / "cornplug" / "checkpoints" / "validated_families.py"
    text = listed.read_text()
    assert '"gemma3"' in text
    listed.write_text(re.sub(r'\n\s+"gemma3"[^\n]*', "", text, count=1))
    ask = (
        "from pathlib import Path; import sys, tempfile\n"
        "from cornplug.checkpoints.checkpoint import Checkpoint\n"
        "from cornplug.engine_common.model_identity import EngineModel\n"
        "from cornplug.errors import CheckpointError\n"
        "from devkit.checkpoints.tiles import gemma3\n"
        "from cornplug.vllm_connector.compat import VALIDATED_FAMILIES\n"
        "found = Checkpoint.open(str(gemma3(Path(tempfile.mkdtemp()))))\n"
        "model = EngineModel(checkpoint=found, dtype='float32',\n"
        "    max_model_len=512, engine='vllm', validated_families=VALIDATED_FAMILIES)\n"
        "try:\n    print('shared', model.tower_identity().identity.hex())\n"
        "except CheckpointError as e:\n    print('refused', e.reason)\n"
    )

    def answer() -> str:
        env = {**os.environ, "PYTHONPATH": str(scratch)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", ask],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert answer() == "refused unproven_family"
    listed.write_text(text)
    assert answer().startswith("shared ")


def test_engine_version_widened_in_one_place_only_is_named(scratch: Path) -> None:
    tests = ("tests/test_versions.py", "-k", "vllm")
    compat = scratch / "cornplug" / "vllm_connector" / "compat.py"
    edit(compat, '"vllm", (0, 32), (0, 34)', '"vllm", (0, 32), (0, 35)')
    status, said = pytest_in(scratch, *tests)
    assert status == 1
    assert "test_versions_extra_installs_the_tested_range[vllm]" in said
    edit(scratch / "pyproject.toml", "vllm>=0.32,<0.34", "vllm>=0.32,<0.35")
    edit(scratch / "script" / "setup", "VLLM=0.32.0", "VLLM=0.33.0")
    status, said = pytest_in(scratch, *tests)
    assert "test_readme_names_the_release_that_the_tests_run_on[vllm]" in said
    readme = scratch / "README.md"
    readme.write_text(readme.read_text().replace("vLLM 0.32", "vLLM 0.33"))
    status, said = pytest_in(scratch, *tests)
    assert status == 0, said
