"""vLLM's workers under Ray, which `ray start` begins without the engine's environment (vllm#34383).

Ray schedules GPUs, and vLLM's CPU platform names no Ray resource: here it names them, and Ray is told of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from integration.stack import count, forget_prefixes, settle_saves
from integration.test_public_reports import PAGE, complete, ids, same

from cornplug.host import free_port
from cornplug.processes import ManagedProcess
from devkit import checkpoints
from devkit.engines import StoreProcess, VllmServer
from devkit.injected_code import injected_environment
from devkit.processes import together

SITE: Final = Path(__file__).parents[2] / ".ray-site"
CODE: Final = 'def change(module):\n    module.CpuPlatform.ray_device_key = "GPU"'
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SITE.is_dir(), reason="Run: script/site ray"),
]


@pytest.fixture
def path_of_modules(tmp_path: Path) -> str:
    injected = injected_environment(tmp_path, CODE, into="vllm.platforms.cpu")
    return os.pathsep.join([injected["PYTHONPATH"], str(SITE)])


@pytest.fixture
def cluster(path_of_modules: str, tmp_path: Path, sockets: Path) -> Iterator[str]:
    """A cluster's address. Its workers have no setting of cornplug in their environment."""
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", f"--temp-dir={sockets / 'ray'}", "--num-gpus=1", "--num-cpus=2"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CORNPLUG_", "XDG_"))}
    head = ManagedProcess(
        command,
        log=tmp_path / "ray.log",
        env={**env, "PYTHONPATH": path_of_modules},
        name="ray start --head",
        health=lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text(errors="replace"),
        ready_timeout_s=120,
    )
    with head:
        yield f"127.0.0.1:{port}"


def test_workers_under_ray_use_the_store_of_the_engines_environment(
    cluster: str, path_of_modules: str, sockets: Path, tmp_path: Path
) -> None:
    model, prompt = checkpoints.qwen2_text(tmp_path / "model"), ids(7, 5 * PAGE)
    flags = ("--block-size", "32")
    # vLLM's newer executor copies its whole environment to the workers.
    executor = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
    of_ray = {"RAY_ADDRESS": cluster, "PYTHONPATH": path_of_modules, **executor}
    with StoreProcess(sockets / "s", log=tmp_path / "store.log") as store:
        ours = {"CORNPLUG_STORE_SOCKET": str(store.socket), "CORNPLUG_STORE_AUTOSTART": "false"}
        shares = ("--kv-connector", "cornplug", "--cornplug-save", "always", "--cornplug-app", "ray")
        stock = VllmServer(model, *flags, log=tmp_path / "stock.log", bed="v1")
        under_ray = VllmServer(
            model,
            *(*flags, *shares, "--distributed-executor-backend", "ray"),
            log=tmp_path / "ray-engine.log",
            env={"VLLM_SERVER_DEV_MODE": "1", **ours, **of_ray},
            bed="v1",
        )
        with together(stock, under_ray):
            expected = complete(stock, prompt)
            same(complete(under_ray, prompt), expected)
            settle_saves(under_ray, store)
            assert store.stat().entries >= 4
            forget_prefixes(under_ray)
            same(complete(under_ray, prompt), expected)
            assert count(under_ray, "saved_tokens_total") >= 4 * PAGE
