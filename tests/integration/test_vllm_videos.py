"""Videos through our towers and through vLLM's own, in the layout of its encoder cache.

Images of every family: `tests/vllm_connector/test_engine_towers.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from devkit import checkpoints


def test_videos_equal_those_of_vllm(tmp_path: Path) -> None:
    recipes = (checkpoints.qwen2_vl, checkpoints.qwen2_5_vl, checkpoints.qwen3_vl)
    models = [str(recipe(tmp_path / recipe.__name__)) for recipe in recipes]
    script = Path(__file__).with_name("vllm_videos.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "group"), *models],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    # 3 frames of 8 x 4 patches; Qwen3-VL with two deepstack levels beside each row.
    assert [shape for shape, _ in found] == [[24, 64], [24, 64], [24, 192]]
    assert max(apart for _, apart in found) < 1e-5
