"""Plans that are really started: our store, and small servers in the engines' place."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.commands.launch_command import main
from cornplug.errors import ConfigError, ProcessFailed
from cornplug.planner.launch import connections
from cornplug.planner.launch.launcher import CommandProcess, CommandSelection, local_commands, run_commands
from cornplug.planner.plan import Plan

from ..plans import Case, plan

FAKE = Path(__file__).parents[1] / "fake_server.py"


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM and its router, by the variables that name them."""
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
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
    monkeypatch.setattr(connections, "ENGINE_PORT", 18400)
    monkeypatch.setattr("cornplug.planner.launch.engine_groups.ROUTER_PORT", 18450)
    return events


def small(case: Case) -> Plan:
    """With a store that any machine has room for."""
    made = plan(case)
    return made.model_copy(update={"caches": [c.model_copy(update={"gib": 0.01}) for c in made.caches]})


@contextmanager
def launched(made: Plan, run_dir: Path, *only: str, on_event: Any = None) -> Iterator[list[CommandProcess]]:
    to_start = local_commands(made, CommandSelection(groups=only), run_dir=run_dir)
    told = {} if on_event is None else {"on_event": on_event}
    with run_commands(made, to_start, run_dir=run_dir, ready_s=30, **told) as processes:
        yield processes


def test_launched_plan_starts_and_ends_in_order(tmp_path: Path, fakes: Path) -> None:
    seen = []
    run_dir = tmp_path / "run"
    with launched(
        small(Case(caches=True, replicas=2)),
        run_dir,
        on_event=lambda process, what: seen.append((process.command.kind, what)),
    ) as processes:
        assert [p.command.kind for p in processes] == ["store", "engine", "engine", "router"]
        assert all(p.is_ready() for p in processes)
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


def test_launched_process_that_fails_shows_log_and_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with (
        pytest.raises(ProcessFailed, match=r"status 3(.|\n)*no memory for the weights"),
        launched(small(Case(caches=True)), tmp_path / "run"),
    ):
        pytest.fail("it never served")
    assert not (tmp_path / "run" / "store.sock").exists()


@pytest.mark.parametrize("how", ["absent", "named"])
def test_launched_missing_program_is_found_before_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The router starts last: engines that have loaded for an hour would be ended for it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CORNPLUG_VLLM_ROUTER")
    if how == "named":
        monkeypatch.setenv("CORNPLUG_VLLM_ROUTER", str(tmp_path / "moved" / "vllm-router"))
    seen: list[str] = []
    with (
        pytest.raises(ConfigError, match="vllm-router"),
        launched(small(Case(replicas=2)), tmp_path / "run", on_event=lambda process, what: seen.append(what)),
    ):
        pytest.fail("there is no router")
    assert seen == []


def test_launched_interpreter_without_the_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment that CORNPLUG_SGLANG_PYTHON names has SGLang, and not its router."""
    lacking = tmp_path / "python"
    lacking.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    lacking.chmod(0o755)
    monkeypatch.setenv("CORNPLUG_SGLANG_PYTHON", str(lacking))
    with (
        expect_error(ConfigError, field="sglang", match="python"),
        launched(small(Case(engine="sglang")), tmp_path / "run"),
    ):
        pytest.fail("it has no SGLang")


def test_local_commands_encoder_beyond_this_host_needs_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(Case("E+PD", hosts=2))
    here = {"HOST_1": "10.0.0.1", "HOST_2": "10.0.0.2"}

    def found(decided: Plan) -> list[str]:
        to_start = local_commands(
            decided,
            CommandSelection(host="HOST_1"),
            run_dir=tmp_path,
            addresses=here,
            secret_file=tmp_path / "secret",
        )
        return [word for c in to_start for word in c.argv]

    with expect_error(
        ConfigError, field="launch.allow_anonymous", match=r"10\.0\.0\.1.*CORNPLUG_ENCODER_REQUIRE_KEY"
    ):
        found(made)
    assert "--allow-anonymous" in found(made.model_copy(update={"allow_anonymous": True}))
    monkeypatch.setenv("CORNPLUG_ENCODER_REQUIRE_KEY", "true")
    assert "--allow-anonymous" not in found(made)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0", ""])
def test_local_commands_address_of_every_interface_is_refused(tmp_path: Path, address: str) -> None:
    made = plan(Case("P+D", hosts=2))
    with expect_error(ConfigError, field=f"--address: HOST_2={address}"):
        local_commands(
            made,
            CommandSelection(host="HOST_1"),
            run_dir=tmp_path,
            addresses={"HOST_1": "10.0.0.1", "HOST_2": address},
        )
    named = made.nodes[0].model_copy(update={"hosts": ["10.0.0.1", address]})
    if address:
        with expect_error(ConfigError, field="nodes['nodes'].hosts"):
            local_commands(
                made.model_copy(update={"nodes": [named]}),
                CommandSelection(host="10.0.0.1"),
                run_dir=tmp_path,
            )


def test_launched_only_one_group_starts(tmp_path: Path) -> None:
    made = plan(Case("P+D"))
    name = made.groups[0].name
    with launched(made, tmp_path / "run", name) as processes:
        assert [p.command.group for p in processes] == [name]
    with expect_error(ConfigError, field="--only"):
        local_commands(made, CommandSelection(groups=["nothing"]), run_dir=tmp_path / "run")


def test_launched_process_is_pinned_to_core(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    made = plan(Case(gpu="cpu-core"))
    group = made.groups[0].model_copy(update={"placement": [[0, core]]})
    with launched(made.model_copy(update={"groups": [group]}), tmp_path / "run") as (p,):
        assert os.sched_getaffinity(p.pid) == {core}
    absent = group.model_copy(update={"placement": [[0, 4000]]})
    with (
        expect_error(ConfigError, field="groups['llm7+vit/EPD@nodes'].placement", match="cores"),
        launched(made.model_copy(update={"groups": [absent]}), tmp_path / "run"),
    ):
        pytest.fail("there is no such core")


def test_main_plan_of_several_hosts_needs_host_option(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(Case("E+PD", hosts=2)).save(path)
    with expect_error(ConfigError, field="--host", match="(?s)HOST_1.*HOST_2"):
        main([str(path)])
    with expect_error(ConfigError, field="--host", match="'HOST_3'"):
        main([str(path), "--host", "HOST_3"])


def test_local_commands_of_one_host_leave_out_the_others_and_the_routers(tmp_path: Path) -> None:
    made = plan(Case("P+D", "sglang", hosts=2))
    here = {"HOST_1": "10.0.0.1", "HOST_2": "10.0.0.2"}
    first = local_commands(made, CommandSelection(host="HOST_1"), run_dir=tmp_path, addresses=here)
    second = local_commands(made, CommandSelection(host="HOST_2"), run_dir=tmp_path, addresses=here)
    routers = local_commands(made, CommandSelection(routers=True), run_dir=tmp_path, addresses=here)
    assert ["prefill" in c.argv for c in first] == [True]
    assert ["decode" in c.argv for c in second] == [True]
    assert [c.kind for c in routers] == ["router"]
    assert any("10.0.0.2" in word for word in routers[0].argv)


def test_local_commands_without_an_address_name_the_missing_one(tmp_path: Path) -> None:
    made = plan(Case("E+PD", "sglang", hosts=2))
    with expect_error(ConfigError, field="--address", match="(?s)HOST_1.*HOST_1=ADDRESS"):
        local_commands(
            made, CommandSelection(host="HOST_2"), run_dir=tmp_path, addresses={"HOST_2": "10.0.0.2"}
        )


def test_local_commands_of_distant_encoders_need_a_common_secret(tmp_path: Path) -> None:
    made, here = plan(Case("E+PD", hosts=2)), {"HOST_1": "10.0.0.1", "HOST_2": "10.0.0.2"}
    with expect_error(ConfigError, field="--secret-file", match="(?s)chmod 600.*scp -p"):
        local_commands(made, CommandSelection(host="HOST_2"), run_dir=tmp_path, addresses=here)
    secret = tmp_path / "secret"
    found = local_commands(
        made, CommandSelection(host="HOST_2"), run_dir=tmp_path, addresses=here, secret_file=secret
    )
    assert {c.env["CORNPLUG_STORE_SECRET_FILE"] for c in found} == {str(secret)}
    assert local_commands(plan(Case("E+PD")), run_dir=tmp_path)


def test_launched_part_of_a_plan_needs_the_secret_s_file_before_it_starts(tmp_path: Path) -> None:
    """A store makes a secret that is missing: each host would have another."""
    made, here = plan(Case("E+PD", hosts=2)), {"HOST_1": "127.0.0.1", "HOST_2": "127.0.0.1"}
    secret, run_dir = tmp_path / "secret", tmp_path / "run"
    to_start = local_commands(
        made, CommandSelection(host="HOST_2"), run_dir=run_dir, addresses=here, secret_file=secret
    )
    for mode in (None, 0o644):
        if mode is not None:
            secret.write_bytes(bytes(32))
            secret.chmod(mode)
        with (
            expect_error(ConfigError, field="store.secret_file"),
            run_commands(made, to_start, run_dir=run_dir),
        ):
            pytest.fail("started")
    assert not run_dir.exists()


def test_main_takes_the_common_secret_of_flag_or_settings_and_never_the_host_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(Case("E+PD", hosts=2)).save(tmp_path / "plan.json")
    line = [str(tmp_path / "plan.json"), "--dry-run", "--host", "HOST_2"]
    line += ["--address", "HOST_1=10.0.0.1", "--address", "HOST_2=10.0.0.2"]
    monkeypatch.delenv("CORNPLUG_STORE_SECRET_FILE", raising=False)
    with expect_error(ConfigError, field="--secret-file"):
        main(line)
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", "/etc/cornplug/secret")
    assert main(line) == 0
    assert "CORNPLUG_STORE_SECRET_FILE=/etc/cornplug/secret" in capsys.readouterr().out
    assert main([*line, "--secret-file", "/elsewhere"]) == 0
    assert "CORNPLUG_STORE_SECRET_FILE=/elsewhere" in capsys.readouterr().out


def test_main_external_server_is_printed_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(Case())
    group = made.groups[0].model_copy(
        update={"name": "tts-G", "tasks": "G", "engine": "external", "model": "org/speech"}
    )
    made.model_copy(update={"groups": [group], "routes": []}).save(tmp_path / "plan.json")
    assert main([str(tmp_path / "plan.json"), "--run-dir", str(tmp_path / "run")]) == 0
    assert "Start your own server of org/speech here" in " ".join(capsys.readouterr().out.split())


def test_launched_replicas_of_one_gpu_start_in_turn(tmp_path: Path) -> None:
    """Each takes its share of the memory that it finds."""
    seen: list[tuple[str, str]] = []
    with launched(
        plan(Case(replicas=2, share=0.5)),
        tmp_path / "run",
        on_event=lambda p, what: seen.append((p.name, what)),
    ):
        pass
    engines = [what for name, what in seen if "router" not in name]
    assert engines == ["starting", "ready", "starting", "ready"]


def test_main_dry_run_prints_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan(Case(caches=True)).save(path)
    assert main([str(path), "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"cornplug serve-store --socket {tmp_path}/run/store.sock --size 20GiB" in printed
    assert "CUDA_VISIBLE_DEVICES=0" in printed
    assert "vllm serve Qwen/Qwen2-VL-7B-Instruct --host 127.0.0.1 --port 18400" in printed
    assert not (tmp_path / "run").exists()


def test_launched_engine_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORNPLUG_SGLANG_PYTHON", raising=False)
    with (
        expect_error(ConfigError, field="sglang", match="CORNPLUG_SGLANG_PYTHON"),
        launched(plan(Case(engine="sglang")), tmp_path / "run"),
    ):
        pytest.fail("SGLang is in another environment")


def test_main_sigterm_ends_processes_with_status_0(tmp_path: Path, fakes: Path, within: TimeLimits) -> None:
    path = tmp_path / "plan.json"
    plan(Case()).save(path)
    code = (
        "import sys; from cornplug.planner.launch import connections; connections.ENGINE_PORT = 18400; "
        "from cornplug.commands.launch_command import main; sys.exit(main(sys.argv[1:]))"
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
    with within(18, "the grace is 20 s"):
        assert launched.wait(60) == 0
    assert fakes.read_text().split() == ["18400"]
