"""`cornplug launch` of apps files as a process: starts, restarts, changes under load, ends."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cornplug.host import free_port
from cornplug.planner.launch.session import CURRENT_PLAN_FILE
from cornplug.planner.plan import Deployment
from devkit.engines import wait_until

SERVER = Path(__file__).parents[1] / "planner" / "draining_server.py"
LATE_S = 100.0

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM's stand-in."""
    fake = tmp_path / "vllm"
    fake.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(SERVER))} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CORNPLUG_VLLM", str(fake))
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("FAKE_ENDS", str(tmp_path / "ends"))
    return tmp_path / "ends"


def apps_file(
    path: Path, port: int, *llms: str, apps: tuple[str, ...] = ("chat",), device: str = "cpu"
) -> Path:
    """Each application has an LLM of its own, and those after it have nothing to do."""
    core = min(os.sched_getaffinity(0))
    text = f'name = "under-test"\n[launch]\nport = {port}\nstore_gib = 0\n'
    for llm in llms:
        text += f'[[components]]\nname = "{llm}"\nkind = "llm"\nmodel = "org/{llm}"\nengines = ["vllm"]\n'
        text += f'resources = {{ device = "{device}", devices = [{core if device == "cpu" else 0}] }}\n'
    for app, llm in zip(apps, llms, strict=False):
        text += f'[[applications]]\nname = "{app}"\nllm = "{llm}"\nslo = {{ ttft_s = 1.0 }}\n'
        text += 'requests = [{ name = "text", rate = 1.0 }]\n'
    path.write_text(text)
    return path


@contextmanager
def launched(file: Path, run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cornplug.cli", "launch", str(file), "--run-dir", str(run_dir), *flags],
        stdout=(run_dir.parent / "out").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(
            lambda: "Ctrl-C ends it" in (run_dir.parent / "out").read_text() or process.poll() is not None,
            deadline_s=LATE_S,
            what="a launch that serves",
        )
        assert process.poll() is None, (run_dir.parent / "out").read_text()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def applied(file: Path, new: Path, run_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    line = ["launch", str(file), "--apply", str(new), "--run-dir", str(run_dir), *flags]
    return subprocess.run(
        [sys.executable, "-m", "cornplug.cli", *line],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def answer(run_dir: Path, app: str = "chat") -> dict[str, object]:
    """Of the engine that routes.json names now."""
    url = json.loads((run_dir / "routes.json").read_text())[f"{app}/text"]["to"][0]["url"]
    answered = httpx.post(f"{url}/v1/completions", json={}, timeout=30, trust_env=False)
    assert answered.status_code == 200
    found: dict[str, object] = answered.json()
    return found


class Stream:
    """Requests one after the other from several clients, each by the routes of that moment."""

    def __init__(self, run_dir: Path, *apps: str, clients: int = 3) -> None:
        self.models: list[object] = []
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        for app in itertools.islice(itertools.cycle(apps), clients):
            self._pool.submit(self._send, run_dir, app)

    def _send(self, run_dir: Path, app: str) -> None:
        while not self._stop.is_set():
            try:
                self.models.append(answer(run_dir, app)["model"])
            except BaseException as e:  # noqa: BLE001
                self.failures.append(e)

    def end(self) -> None:
        self._stop.set()
        self._pool.shutdown()


@pytest.mark.more
def test_launch_command_change_under_load_fails_no_request(tmp_path: Path) -> None:
    port = free_port()
    old = apps_file(tmp_path / "a.toml", port, "a")
    new = apps_file(tmp_path / "b.toml", port, "b")
    run_dir = tmp_path / "run"
    with launched(old, run_dir, "--settle-s", "2") as process:
        stream = Stream(run_dir, "chat")
        wait_until(lambda: "org/a" in stream.models, deadline_s=LATE_S, what="an answer of a")
        done = applied(old, new, run_dir)
        wait_until(lambda: stream.models[-1] == "org/b", deadline_s=LATE_S, what="an answer of b")
        stream.end()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "end a-0, once clients have the new routes" in done.stdout
        assert stream.failures == []
        assert {*stream.models} == {"org/a", "org/b"}
        assert Deployment.load(run_dir / CURRENT_PLAN_FILE).groups[0].ports == [port + 1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.more
def test_launch_command_change_keeps_what_is_the_same(tmp_path: Path) -> None:
    port = free_port()
    old = apps_file(tmp_path / "a.toml", port, "a")
    new = apps_file(tmp_path / "ab.toml", port, "a", "b", apps=("chat", "more"))
    run_dir = tmp_path / "run"
    with launched(old, run_dir, "--settle-s", "0.5"):
        before = answer(run_dir)["pid"]
        dry = applied(old, new, run_dir, "--dry-run")
        assert dry.stdout.split("\n")[:2] == ["keep a-0", f"start b-0 at http://127.0.0.1:{port + 1}"]
        assert applied(old, new, run_dir).returncode == 0
        assert answer(run_dir)["pid"] == before
        assert answer(run_dir, "more")["model"] == "org/b"


@pytest.mark.more
def test_launch_command_new_plan_that_fails_leaves_the_old_one(tmp_path: Path, engine: Path) -> None:
    port = free_port()
    old = apps_file(tmp_path / "a.toml", port, "a")
    new = apps_file(tmp_path / "b.toml", port, "b")
    run_dir = tmp_path / "run"
    with launched(old, run_dir, "--settle-s", "0.5"):
        engine.write_text("org/b")
        done = applied(old, new, run_dir)
        assert done.returncode == 1
        assert "no memory for the weights" in done.stderr
        assert answer(run_dir)["model"] == "org/a"
        engine.unlink()
        assert applied(old, new, run_dir).returncode == 0
        assert answer(run_dir)["model"] == "org/b"


def test_launch_command_killed_engine_starts_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(apps_file(tmp_path / "a.toml", free_port(), "a"), run_dir):
        pid = answer(run_dir)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

        def again() -> bool:
            try:
                return answer(run_dir)["pid"] != pid
            except httpx.TransportError:
                return False

        wait_until(again, deadline_s=LATE_S, what="another engine")
        said = (tmp_path / "out").read_text()
        assert "a-0: ended with status -9; restarting in 1 s" in said
        assert (run_dir / "a-0.log.1").exists()


@pytest.mark.more
def test_launch_command_engine_that_ends_too_often_is_status_1(tmp_path: Path, engine: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(apps_file(tmp_path / "a.toml", free_port(), "a"), run_dir, "--restarts", "1") as process:
        pid = answer(run_dir)["pid"]
        assert isinstance(pid, int)
        engine.write_text("org/a")
        os.kill(pid, signal.SIGKILL)
        assert process.wait(LATE_S) == 1
        assert "will not be restarted" in (tmp_path / "out").read_text()


@pytest.mark.more
def test_launch_command_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(apps_file(tmp_path / "a.toml", free_port(), "a"), run_dir) as process:
        pid = answer(run_dir)["pid"]
        process.kill()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), deadline_s=LATE_S, what="the engine's end")


@pytest.mark.more
def test_launch_command_sigterm_finishes_requests_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_REQUEST_S", "5")
    run_dir, port = tmp_path / "run", free_port()
    with (
        launched(apps_file(tmp_path / "a.toml", port, "a"), run_dir) as process,
        ThreadPoolExecutor() as pool,
    ):
        answers = [pool.submit(answer, run_dir) for _ in range(3)]

        def all_under_way() -> bool:
            asked = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=30)
            under_way: int = asked.json()["under_way"]
            return under_way == 3

        wait_until(all_under_way, deadline_s=LATE_S, what="requests under way")
        process.send_signal(signal.SIGTERM)
        assert [one.result()["model"] for one in answers] == ["org/a"] * 3
        assert process.wait(60) == 0


@pytest.mark.more
def test_launch_command_second_launcher_of_a_folder_is_refused(tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", apps_file(tmp_path / "a.toml", free_port(), "a")
    with launched(file, run_dir):
        line = [sys.executable, "-m", "cornplug.cli", "launch", str(file), "--run-dir", str(run_dir)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert "--run-dir: another process is listening on" in done.stderr
        assert answer(run_dir)["model"] == "org/a"


def test_launch_command_apply_without_a_launcher_names_the_remedy(tmp_path: Path) -> None:
    file = apps_file(tmp_path / "a.toml", free_port(), "a")
    done = applied(file, file, tmp_path / "run")
    assert done.returncode == 2
    assert "Start the first plan with `cornplug launch`" in done.stderr
