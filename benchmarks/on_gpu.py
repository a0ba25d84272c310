"""Measure on a GPU machine, the most valuable first; script/test-gpu prepares the environment.

    python benchmarks/on_gpu.py [SECTION ...] [--out DIR] [--budget SECONDS] [--rehearse]

`--rehearse` goes through all sections without a GPU, with tiny models: its figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import machine
from gpu_sections import runner
from gpu_sections.figures import Figures
from gpu_sections.runner import Section

SECTIONS: Final = (
    Section("engines", 300, "vLLM and SGLang start, stock and with cornplug, and a fresh engine hits"),
    Section("copies", 90, "KV pages to and from the store's memory, beside a pinned copy (aim 0.8)"),
    Section(
        "fresh", 300, "TTFT of a fresh engine at 2k, 8k and 32k tokens, beside stock and native offloads"
    ),
    Section("decode", 240, "decoding while pages are saved, beside stock (aim: at most 2 % slower)"),
    Section("second_app", 240, "TTFT of a second app that asks about the first one's image"),
    Section("encoder", 180, "images a second beside transformers (aim 3), and beside a matmul (aim 0.5)"),
    Section("cuda_tests", 240, "tests marked gpu"),
)
_BUDGET_S: Final = 1500.0
_MODELS_BYTES: Final = 40 << 30
"""Room for checkpoints of the size of an 8B model in main memory, and for what else is there."""


def main() -> int:
    """Run the sections; 1 if one did not pass."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="test-gpu", description=__doc__.partition("\n")[0],
        epilog="; ".join(f"{section.name}: {section.summary}" for section in SECTIONS),
    )  # fmt: skip
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), metavar="DIR",
                        help="folder for SECTION.json (default: %(default)s)")  # fmt: skip
    parser.add_argument("--budget", type=float, default=_BUDGET_S, metavar="SECONDS",
                        help="time of all sections (default: %(default)g)")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at sizes that say nothing")
    parser.add_argument("--inside", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.sections) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    if chosen.inside:
        return measure(
            chosen.sections[0], Figures(chosen.inside, rehearse=chosen.rehearse, seconds=chosen.budget)
        )
    wanted = [section for section in SECTIONS if section.name in (chosen.sections or names)]
    rehearse = ["--rehearse"] if chosen.rehearse else []

    def command(section: Section, file: Path, seconds: float) -> Sequence[str]:
        inside = ["--inside", str(file.absolute()), "--budget", str(seconds)]
        return [sys.executable, __file__, section.name, *inside, *rehearse]

    about = {"rehearsal": chosen.rehearse, "gpu": gpu(), "machine": machine.describe()}
    with_models_in_memory = None if chosen.rehearse else models_in_memory()
    try:
        statuses = runner.run(wanted, chosen.out, chosen.budget, command, about)
    finally:
        if with_models_in_memory:
            shutil.rmtree(with_models_in_memory, ignore_errors=True)
    print("\n" + ", ".join(f"{name} {status}" for name, status in statuses.items()))
    return int(any(status != runner.PASSED for status in statuses.values()))


def measure(name: str, figures: Figures) -> int:
    """Run one section in this process; 1 if one of its steps failed."""
    # As Ctrl-C: engines are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with figures.step("section"):
        importlib.import_module(f"gpu_sections.{name}").measure(figures)
    return int(figures.failed)


def gpu() -> str | None:
    """Name, memory and driver of the GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or None


def models_in_memory() -> Path | None:
    """Let checkpoints be written to main memory, if there is room: a disk would take minutes."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < _MODELS_BYTES:
        return None
    folder = memory / f"cornplug-test-gpu-{os.getpid()}"
    folder.mkdir(mode=0o700)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
