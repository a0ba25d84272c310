"""Plans the four services, plans the deployment made by hand, and shows the difference.

    script/demo plan_and_launch [--out DIR] [--launch]

Planning needs no GPU. `--launch` goes on to the small plan that this machine can run: it profiles
tiny models on its cores, plans for two of them, starts the plan's real processes and compares their
latencies with the simulation of the plan (benchmarks/plan_vs_real.py; ten minutes, as root).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_BENCHMARK = HERE.parents[1] / "benchmarks" / "plan_vs_real.py"


def main() -> int:
    """0 when both plans were made, and the launched one behaved as simulated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="keep what is written here; default: nowhere")
    parser.add_argument(
        "--launch", action="store_true", help="launch a plan of two cores of this machine, too"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cp-demo-") as scratch:
        folder = args.out or Path(scratch)
        for name in ("plan", "hand-made"):
            line = ["plan", str(HERE / f"{name}.toml"), "-o", str(folder / name)]
            line += [] if name == "plan" else ["--quiet", "--explain", "0"]
            subprocess.run([sys.executable, "-m", "cornplug.cli", *line], check=True)
        plans = [str(folder / name / "plan.json") for name in ("plan", "hand-made")]
        subprocess.run([sys.executable, str(HERE / "compare.py"), *plans], check=True)
        if not args.launch:
            return 0
        out = ["--out", str(folder / "launched")]
        return subprocess.run([sys.executable, str(_BENCHMARK), "--quick", *out], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
