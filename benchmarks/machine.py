"""Description of the measuring machine: `python benchmarks/machine.py` prints it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cornplug

if TYPE_CHECKING:
    import torch

_SET_BY_USER = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Processor, cores, memory, versions, and how busy the machine is at this moment.

    `device`: torch's, where something is measured on one that is not the CPU.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": _accelerator_name(device),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {
            "cornplug": cornplug.__version__,
            **{name: _version(name) for name in ("vllm", "torch", "transformers")},
        },
        "environment": {name: os.environ[name] for name in _SET_BY_USER if name in os.environ},
        "load_at_start": [round(value, 2) for value in os.getloadavg()],
        "busy_at_start": round(busy_cores(1.0), 2),
    }


def busy_cores(seconds: float) -> float:
    """Cores that all processes of the machine together keep busy, over the next `seconds`."""
    before, began = _busy_s(), time.monotonic()
    time.sleep(seconds)
    return (_busy_s() - before) / (time.monotonic() - began)


def line(machine: dict[str, Any]) -> str:
    """The description in two lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine.get('accelerator') or 'no GPU used'}; "
        f"{machine['system']}; {versions}; Python {machine['python']}.\n"
        f"{machine['date']}; commit {machine.get('commit') or 'unknown'}; "
        f"load at start {machine['load_at_start'][0]:.2f}, "
        f"{machine['busy_at_start']:.2f} cores busy with other work."
    )


def _cpu_name() -> str:
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("model name"):
            return row.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """The checkout's commit; with "-dirty" if it has uncommitted changes."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _accelerator_name(device: torch.device | None) -> str | None:
    if device is None or device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _busy_s() -> float:
    # user nice system idle iowait irq softirq steal; stolen time is busy for us as well
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    print(json.dumps(describe(), indent=2))
