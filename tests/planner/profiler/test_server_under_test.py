"""A server started to be measured: waited for, explained when it does not come up, ended."""

import subprocess

import pytest

from cornplug.errors import ProcessFailed
from cornplug.host import free_port
from cornplug.planner.engine_steps import SampleGrid, engine, run_server
from cornplug.planner.launch.command_lines import LaunchCommand

GRID = SampleGrid(prompts=(64, 4096), batches=(1, 8), output_tokens=32, repeats=3)


def served(port: int, *argv: str) -> LaunchCommand:
    """Any program, as if it were an engine."""
    health = f"http://127.0.0.1:{port}/"
    return LaunchCommand("profile", 0, "127.0.0.1", argv, {}, "engine", port, health)


def test_running_server_that_exits_shows_log(tmp_path):
    command = served(9, "python3", "-c", "import sys; print('no such model'); sys.exit(3)")

    with (
        pytest.raises(ProcessFailed, match=r"(?s)ended with status 3.*no such model"),
        run_server(command, log=tmp_path / "log", ready_s=20),
    ):
        pass


def test_running_silent_server_is_stopped(tmp_path):
    command = served(9, "python3", "-c", f"import time; time.sleep(60)  # {tmp_path}")

    with (
        pytest.raises(ProcessFailed, match=r"not ready after 0\.2 s"),
        run_server(command, log=tmp_path / "log", ready_s=0.2),
    ):
        pass
    assert subprocess.run(["pgrep", "-f", f"# {tmp_path}"], check=False).returncode == 1


def test_running_server_is_ready_then_ended(tmp_path):
    port = free_port()
    command = served(port, "python3", "-m", "http.server", str(port), "--bind", "127.0.0.1")

    with run_server(command, log=tmp_path / "log", ready_s=20) as url:
        assert url == f"http://127.0.0.1:{port}"
    assert subprocess.run(["pgrep", "-f", f"http.server {port}"], check=False).returncode == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engine_flags_one_iteration_per_prompt_without_cache(kind):
    line = engine(kind, "/m", GRID, tp=2, pp=1, cores=()).argv

    chunk = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}[kind]
    assert int(line[line.index(chunk) + 1]) > 4096
    assert {"--no-enable-prefix-caching", "--disable-radix-cache"} & set(line)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engine_without_gpu_binds_threads_to_cores(kind):
    command = engine(kind, "/m", GRID, tp=2, pp=1, cores=(0, 1))

    assert command.cores == (0, 1)
    assert command.env[f"{kind.upper()}_CPU_OMP_THREADS_BIND"] == "0|1"
