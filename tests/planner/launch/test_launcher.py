"""Plans that are really started: our store, and small servers in the engines' place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from cornplug.errors import ConfigError
from cornplug.planner.launch import addresses
from cornplug.planner.launch.launcher import main, running
from cornplug.planner.launch.process_runner import ProcessEnded
from cornplug.planner.plan import Plan

from ..plans import Case, plan

FAKE = Path(__file__).parents[1] / "fake_server.py"


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM and its router, by the variables that name them."""
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    fake.chmod(0o755)
    events = tmp_path / "events"
    for name, value in (
        ("CORNPLUG_VLLM", fake),
        ("CORNPLUG_VLLM_ROUTER", fake),
        ("FAKE_EVENTS", events),
        ("CORNPLUG_STORE_SECRET_FILE", tmp_path / "secret"),
    ):
        monkeypatch.setenv(name, str(value))
    # Away from what else may run on this machine.
    monkeypatch.setattr(addresses, "ENGINE_PORT", 18400)
    monkeypatch.setattr("cornplug.planner.launch.routers.ROUTER_PORT", 18450)
    return events


def small(case: Case) -> Plan:
    """With a store that any machine has room for."""
    made = plan(case)
    return made.model_copy(update={"caches": [c.model_copy(update={"gib": 0.01}) for c in made.caches]})


def test_a_plan_is_started_served_and_ended_in_order(tmp_path: Path, fakes: Path) -> None:
    seen = []
    run_dir = tmp_path / "run"
    with running(
        small(Case(caches=True, replicas=2)),
        run_dir=run_dir,
        ready_s=30,
        event=lambda process, what: seen.append((process.command.kind, what)),
    ) as processes:
        assert [p.command.kind for p in processes] == ["store", "engine", "engine", "router"]
        assert all(p.ready() for p in processes)
        for port in (18400, 18401, 18450):
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        assert (run_dir / "store.sock").is_socket()
        assert (run_dir / "routes.json").exists()
        pids = [p.pid for p in processes]
    assert seen.index(("store", "ready")) < seen.index(("engine", "starting"))
    assert seen.index(("router", "starting")) > max(i for i, e in enumerate(seen) if e == ("engine", "ready"))
    ended = fakes.read_text().split()
    assert ended[0] == "18450"
    assert sorted(ended[1:]) == ["18400", "18401"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (run_dir / "store.sock").exists()


def test_what_fails_says_so_with_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with (
        pytest.raises(ProcessEnded, match=r"status 3(.|\n)*no memory for the weights"),
        running(small(Case(caches=True)), run_dir=tmp_path / "run", ready_s=30),
    ):
        pytest.fail("it never served")
    assert not (tmp_path / "run" / "store.sock").exists()


def test_a_group_alone(tmp_path: Path) -> None:
    made = plan(Case("P+D"))
    name = made.groups[0].name
    with running(made, run_dir=tmp_path / "run", only=[name], ready_s=30) as processes:
        assert [p.command.group for p in processes] == [name]
    with (
        pytest.raises(ConfigError, match="--only"),
        running(made, run_dir=tmp_path / "run", only=["nothing"]),
    ):
        pytest.fail("there is no such group")


def test_a_core_is_kept_to(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    made = plan(Case(gpu="cpu-core"))
    group = made.groups[0].model_copy(update={"placement": [[0, core]]})
    with running(made.model_copy(update={"groups": [group]}), run_dir=tmp_path / "run", ready_s=30) as (p,):
        assert os.sched_getaffinity(p.pid) == {core}
    absent = group.model_copy(update={"placement": [[0, 4000]]})
    with (
        pytest.raises(ConfigError, match="cores"),
        running(made.model_copy(update={"groups": [absent]}), run_dir=tmp_path / "run"),
    ):
        pytest.fail("there is no such core")


def test_several_hosts_are_for_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(Case("E+PD", hosts=2)).save(path)
    with pytest.raises(ConfigError, match=r"needs 2 hosts(.|\n)*launch-HOST\.sh"):
        main([str(path)])


def test_a_dry_run_prints_what_would_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan(Case(caches=True)).save(path)
    assert main([str(path), "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"cornplug serve-store --socket {tmp_path}/run/store.sock --size 20GiB" in printed
    assert "CUDA_VISIBLE_DEVICES=0" in printed
    assert "vllm serve Qwen/Qwen2-VL-7B-Instruct --host 127.0.0.1 --port 18400" in printed
    assert not (tmp_path / "run").exists()


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORNPLUG_SGLANG_PYTHON", raising=False)
    with (
        pytest.raises(ConfigError, match="CORNPLUG_SGLANG_PYTHON"),
        running(plan(Case(engine="sglang")), run_dir=tmp_path / "run"),
    ):
        pytest.fail("SGLang is in another environment")


def test_sigterm_ends_all_and_the_status_is_0(tmp_path: Path, fakes: Path) -> None:
    path = tmp_path / "plan.json"
    plan(Case()).save(path)
    code = (
        "import sys; from cornplug.planner.launch import addresses; addresses.ENGINE_PORT = 18400; "
        "from cornplug.planner.launch.launcher import main; sys.exit(main(sys.argv[1:]))"
    )
    launched = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "--run-dir", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launched.stdout is not None
    for line in launched.stdout:
        if "Ctrl-C" in line:
            break
    launched.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert launched.wait(30) == 0
    assert time.monotonic() - began < 10
    assert fakes.read_text().split() == ["18400"]
