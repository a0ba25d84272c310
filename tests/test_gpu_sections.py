"""script/test-gpu: a section that fails, crashes or hangs stops no other, and each leaves its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from driver import repeated_layers
from gpu_sections.figures import Figures
from safetensors.torch import load_file

from devkit.checkpoints import qwen2_text

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUN = """
import json, sys
from pathlib import Path
from gpu_sections import runner
from gpu_sections.runner import Section

runner._GRACE_S = 2.0
out, budget, sections = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
known = [Section(name, limit, name) for name, limit, _ in sections]
scripts = {name: script for name, _, script in sections}


def command(section, file, seconds):
    return [sys.executable, "-c", scripts[section.name], str(file)]


print(json.dumps(runner.run(known, out, budget, command, {"machine": "here"})), file=sys.stderr)
"""
FIGURE = """
import sys
from pathlib import Path
from gpu_sections.figures import Figures
figures = Figures(Path(sys.argv[1]), rehearse=True, seconds=60)
figures.add("speed", 7)
"""
HANGING = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
figures.add("engine", engine.pid)
time.sleep(600)
"""


def run(out: Path, *sections: tuple[str, float, str], budget_s: float = 100) -> tuple[dict[str, str], Any]:
    """Each section's status, and what its file holds."""
    arguments = [sys.executable, "-c", RUN, out, str(budget_s), json.dumps(sections)]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=100, check=True)
    statuses = json.loads(done.stderr.splitlines()[-1])
    return statuses, {name: json.loads((out / f"{name}.json").read_text()) for name, *_ in sections}


def test_sections_survive_the_failure_of_each(tmp_path: Path) -> None:
    statuses, files = run(
        tmp_path,
        ("raises", 60, FIGURE + "raise OSError('no engine')"),
        ("crashes", 60, FIGURE + "import os\nos.abort()"),
        ("silent", 60, "raise SystemExit(4)"),
        ("passes", 60, FIGURE),
    )
    assert statuses == {"raises": "failed", "crashes": "failed", "silent": "failed", "passes": "passed"}
    for name in ("raises", "crashes", "passes"):
        assert files[name]["figures"] == {"speed": 7}
        assert files[name]["machine"] == "here"
    assert files["crashes"]["failures"]["section"] == "ended with status -6"
    assert files["silent"] | {"seconds": 0} == {
        "section": "silent",
        "status": "failed",
        "seconds": 0,
        "limit_s": 60,
        "machine": "here",
        "figures": {},
        "failures": {"section": "ended with status 4"},
    }


def test_hanging_section_is_stopped_with_its_engines(tmp_path: Path) -> None:
    statuses, files = run(tmp_path, ("hangs", 3, FIGURE + HANGING), ("passes", 60, FIGURE))
    assert statuses == {"hangs": "timed out", "passes": "passed"}
    assert files["hangs"]["figures"]["speed"] == 7
    assert not Path(f"/proc/{files['hangs']['figures']['engine']}").exists()


def test_section_is_not_run_without_time(tmp_path: Path) -> None:
    statuses, files = run(tmp_path, ("late", 60, FIGURE), budget_s=3)
    assert statuses == {"late": "not run"}
    assert files["late"]["figures"] == {}


def test_figures_are_written_one_by_one_and_failed_steps_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "section.json"
    figures = Figures(file, rehearse=True, seconds=60)
    figures.add("first", 1)
    assert json.loads(file.read_text()) == {"figures": {"first": 1}, "failures": {}}
    with figures.step("second"):
        raise SystemExit("no fair measurement")
    with figures.step("third"):
        time.sleep(0.01)
    with pytest.raises(KeyboardInterrupt), figures.step("fourth"):
        raise KeyboardInterrupt
    left = json.loads(file.read_text())
    assert "no fair measurement" in left["failures"]["second"]
    assert set(left["figures"]) == {"first", "third, s"}
    assert figures.failed


def test_unknown_section_is_refused() -> None:
    command = [sys.executable, BENCHMARKS / "on_gpu.py", "nonsense"]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no section nonsense" in done.stderr


def test_checkpoint_of_equal_layers_has_them_all(tmp_path: Path) -> None:
    one = load_file(qwen2_text(tmp_path / "one", layers=1) / "model.safetensors")
    folder = repeated_layers.qwen2_text(tmp_path / "three", layers=3)
    three = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    layer = {name for name in one if name.startswith("model.layers.0.")}
    assert len(three) == len(one) + 2 * len(layer)
    for name in three:
        assert three[name].equal(
            one[name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.0.")]
        )
