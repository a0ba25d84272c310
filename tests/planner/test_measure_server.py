"""A server started to be measured: waited for, explained when it does not come up, ended."""

import subprocess
import sys
import time

import pytest

from cornplug.errors import CornplugError
from cornplug.planner.measure_points import Grid
from cornplug.planner.measure_server import engine_command, free_port, running

GRID = Grid(prompts=(64, 4096), batches=(1, 8), output_tokens=32, repeats=3)


def test_a_server_that_ends_at_once_is_explained_by_its_log(tmp_path):
    line = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]

    with (
        pytest.raises(CornplugError, match=r"(?s)ended with status 3.*no such model"),
        running(line, env={}, health="http://127.0.0.1:9/health", log=tmp_path / "log", ready_s=20),
    ):
        pass


def test_it_is_ready_when_it_answers_and_gone_afterwards(tmp_path):
    port = free_port()
    line = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]

    with running(line, env={}, health=f"http://127.0.0.1:{port}/", log=tmp_path / "log", ready_s=20):
        pass
    time.sleep(0.05)
    assert subprocess.run(["pgrep", "-f", f"http.server {port}"], check=False).returncode == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prompt_is_one_iteration_and_no_cache_helps(engine):
    line = engine_command(engine, "/m", GRID, port=1, tp=2, pp=1, on_cpu=False, python="/venv/bin/python")
    flags = " ".join(line)

    chunk = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}[engine]
    assert int(line[line.index(chunk) + 1]) > 4096
    assert ("--no-enable-prefix-caching" in flags) or ("--disable-radix-cache" in flags)
