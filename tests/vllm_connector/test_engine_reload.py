"""vLLM's models tell which parameters a reload has loaded: all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devkit import checkpoints

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


@pytest.mark.parametrize("make", [checkpoints.llava, checkpoints.qwen2_vl])
def test_engine_reload_of_another_checkpoint_is_voted_for(make: Callable[..., Path], tmp_path: Path) -> None:
    old, new = make(tmp_path / "old"), make(tmp_path / "new", llm_seed=21, tower_seed=22)
    program = Path(__file__).with_name("engine_reload.py")
    done = subprocess.run([sys.executable, program, old, new], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip("\n").split("\n")[-1] == f"{new.resolve()}\t"
