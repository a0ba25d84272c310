"""Our towers beside vLLM's own, in its encoder cache's layout: what engines share has to be one thing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cornplug.testing import checkpoints

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("recipe", "width"),
    [(checkpoints.qwen2_vl, 64), (checkpoints.qwen2_5_vl, 64), (checkpoints.qwen3_vl, 3 * 64)],
)
def test_pictures_and_videos_equal_those_of_vllm(
    recipe: Callable[[Path], Path], width: int, tmp_path: Path
) -> None:
    model = recipe(tmp_path / "model")
    script = Path(__file__).with_name("vllm_tower.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(tmp_path / "group")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (picture, apart), (video, apart_too) = json.loads(done.stdout.splitlines()[-1])
    assert picture == [4 * 6 // 4, width]
    assert video == [3 * 8 * 4 // 4, width]
    # vLLM adds up in another order.
    assert max(apart, apart_too) < 1e-5
