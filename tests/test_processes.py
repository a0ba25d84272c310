"""A managed process ends with all its descendants, and a failed start shows its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cornplug.errors import ProcessFailed
from cornplug.processes import ManagedProcess
from devkit.engines import wait_until
from devkit.processes import environment, together

# Starts a child that ignores SIGTERM, as a wedged engine core would, then waits.
STUBBORN = """
import signal, subprocess, sys, time
ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
code = f"import signal, time; {{ignore}}; print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
{leader}
print("leader", flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def python(code: str, log: Path) -> ManagedProcess:
    return ManagedProcess([sys.executable, "-c", code], log=log, env=environment({"PYTHONUNBUFFERED": "1"}))


def test_environment_without_variables_of_imported_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's keys count AITER's variables, which `import vllm` sets: CI's two engines shared nothing."""
    monkeypatch.setenv("AITER_SITUV2_A4W4", "1")
    monkeypatch.setenv("CORNPLUG_SECRET", "a test's own")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    with python(code, tmp_path / "log") as process:
        wait_until(lambda: not process.is_alive(), deadline_s=60, what="the end")
    began = json.loads((tmp_path / "log").read_text())
    assert "AITER_SITUV2_A4W4" not in began
    assert began["CORNPLUG_SECRET"] == "a test's own"
    assert began["PATH"]
    assert began["PYTHONUNBUFFERED"] == "1"


def test_together_ends_all_where_one_does_not_start(tmp_path: Path) -> None:
    good = python("import time; time.sleep(600)", tmp_path / "good")
    bad = ManagedProcess([str(tmp_path / "no such program")], log=tmp_path / "bad")
    with pytest.raises(FileNotFoundError), together(good, bad):
        pass
    assert not good.is_alive()
    with together(good):
        assert good.is_alive()
    assert not good.is_alive()


def started(process: ManagedProcess) -> list[int]:
    """Start it and wait for leader and child; their ids."""
    process.start()
    wait_until(lambda: {"up", "leader"} <= set(process.log_tail().split()), deadline_s=60, what="both up")
    pids = process.pids()
    assert len(pids) == 2
    assert pids[0] == process.pid
    return pids


def test_stop_ends_descendants_that_ignore_sigterm(tmp_path: Path) -> None:
    process = python(STUBBORN.format(leader=""), tmp_path / "log")
    pids = started(process)
    assert process.stop() == -signal.SIGTERM
    assert not any(map(running, pids))


def test_stop_ends_a_leader_that_ignores_sigterm(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = python(STUBBORN.format(leader=ignore), tmp_path / "log")
    pids = started(process)
    assert process.stop(grace_s=0.2) == -signal.SIGKILL
    assert not any(map(running, pids))


def test_kill_ends_orphans_of_a_leader_that_is_gone(tmp_path: Path) -> None:
    process = python(STUBBORN.format(leader=""), tmp_path / "log")
    leader, child = started(process)
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: not process.is_alive(), deadline_s=60, what="leader dead")
    assert process.pids() == [child]
    process.kill()
    assert not running(child)


def test_freeze_processes_can_go_on_and_be_stopped(tmp_path: Path) -> None:
    process = python(STUBBORN.format(leader=""), tmp_path / "log")
    pids = started(process)

    def states() -> set[str]:
        return {Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in pids}

    process.freeze()
    wait_until(lambda: states() == {"T"}, deadline_s=60, what="stopped")
    process.resume()
    wait_until(lambda: "T" not in states(), deadline_s=60, what="continued")
    process.freeze()
    process.stop()
    assert not any(map(running, pids))


def test_managed_process_exception_in_the_block_ends_it(tmp_path: Path) -> None:
    process = python("import time; time.sleep(600)", tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), process:
        pid = process.pid
        raise KeyboardInterrupt
    assert not running(pid)


def test_managed_process_failed_start_shows_the_log(tmp_path: Path) -> None:
    class Never(ManagedProcess):
        def is_ready(self) -> bool:
            return False

    command = [sys.executable, "-c", "import sys; sys.exit('no such model: x')"]
    with pytest.raises(ProcessFailed, match=r"status 1 before it was ready[\s\S]*no such model: x"):
        Never(command, log=tmp_path / "log").start()

    slow = Never(
        [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "slow", ready_timeout_s=0.3
    )
    with pytest.raises(ProcessFailed, match=r"not ready after 0.3 s"):
        slow.start()
    assert not running(slow.pid)


def test_managed_process_ends_with_the_interpreter(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cornplug.processes import ManagedProcess\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"p = ManagedProcess(sleeper, log=Path({str(tmp_path / 'l')!r}))\n"
        "print(p.start().pid)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert not running(int(out.stdout))


def test_managed_process_with_ends_with_parent_ends_after_sigkill_of_the_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from cornplug.processes import ManagedProcess\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"p = ManagedProcess(sleeper, log=Path({str(tmp_path / 'l')!r}), ends_with_parent=True)\n"
        "p.spawn(); print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert running(pid)
    parent.kill()
    parent.wait(60)
    wait_until(lambda: not running(pid), deadline_s=60, what="the child's end")


def test_managed_process_with_ends_with_parent_starts_in_the_main_thread_only(tmp_path: Path) -> None:
    process = ManagedProcess(["true"], log=tmp_path / "log", ends_with_parent=True)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ProcessFailed, match="main thread"):
        pool.submit(process.spawn).result()
