"""Description of the machine and the package versions with which a measurement is made."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("cornplug", "torch")


def machine() -> dict[str, str]:
    """Describe this machine, its GPUs, the date and the package versions, for the provenance of a table."""
    found = {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {_cpu()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> str:
    """Describe the machine's GPUs, as in "2 x NVIDIA H100 80GB HBM3". Returns "" if it has none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    names = listed.stdout.strip().splitlines() if listed.returncode == 0 else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
