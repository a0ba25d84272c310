"""Images a second of the encoder's towers beside transformers and beside a matmul: tower_throughput.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from gpu_sections.figures import Figures

_BENCHMARK: Final = Path(__file__).parents[1] / "tower_throughput.py"
_ON_GPU: Final = ("--device", "cuda", "--dtype", "bfloat16")
_REHEARSAL: Final = ("--depth", "1", "--images", "1")


def measure(figures: Figures) -> None:
    """Add the benchmark's rows; with torch.compile, too, if there is time."""
    for name, more in {"eager": (), "compiled": ("--compile",)}.items():
        if name == "compiled" and (figures.rehearse or figures.left_s < 60):
            figures.add(name, "not measured")
            continue
        with figures.step(name), tempfile.TemporaryDirectory(prefix="cp-bench-") as out:
            which = _REHEARSAL if figures.rehearse else _ON_GPU
            command = [sys.executable, str(_BENCHMARK), "--quick", *which, *more, "--out", out]
            subprocess.run(command, check=True)
            found = json.loads((Path(out) / "tower_throughput.json").read_text())
            for row in found["rows"]:
                kept = {
                    key: row[key] for key in ("stock", "cornplug", "ratio", "ratio_95", "target", "verdict")
                }
                figures.add(f"{name}: {row['name']}", kept)
            figures.add(f"{name}: facts", found["facts"])
