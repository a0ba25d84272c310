"""The thread that copies KV on a CPU leaves the cores of the compute threads alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys, threading
import torch
from cornplug.vllm_connector.kv_copies.block_copies import leave_compute_cores
os.sched_setaffinity(0, {int(core) for core in sys.argv[1:]})
found = {}
def run():
    leave_compute_cores()
    found["cores"], found["threads"] = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
thread = threading.Thread(target=run)
torch.set_num_threads(2)
thread.start()
thread.join()
print(json.dumps({**found, "main": sorted(os.sched_getaffinity(0)), "main threads": torch.get_num_threads()}))
"""
CORES = sorted(os.sched_getaffinity(0))


def started_by_main_on(*cores: int) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, *map(str, cores)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.more
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_helper_thread_leaves_core_of_pinned_main() -> None:
    found = started_by_main_on(CORES[0])
    assert found["main"] == [CORES[0]]
    assert found["cores"]
    assert CORES[0] not in found["cores"]  # type: ignore[operator]


@pytest.mark.more
def test_helper_thread_computes_alone() -> None:
    found = started_by_main_on(*CORES)
    assert found == {"main": CORES, "cores": CORES, "threads": 1, "main threads": 2}
