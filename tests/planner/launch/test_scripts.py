"""Launch scripts, run by bash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.planner.launch import addresses
from cornplug.planner.launch.scripts import quoted, scripts, write

from ..plans import Case, matrix, plan

FAKE = Path(__file__).parents[1] / "fake_server.py"


@settings(max_examples=5, deadline=None)
@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\n"))
        | st.sampled_from(["a b", "$HOME", "`id`", "$(id)", '"', "\\", "'", "!x", "*", '{"a": "b"}', ""]),
        min_size=20,
        max_size=40,
    )
)
def test_bash_reads_back_what_was_meant(words: list[str]) -> None:
    """Whatever a plan's names hold: only our variables are expanded."""
    with_variables = [f"{word}${{HOST_1}}{word}" for word in words]
    shown = "\n".join(f"printf '%s\\n' {quoted(word)}" for word in [*words, *with_variables])
    printed = subprocess.run(
        ["bash", "-c", shown], env={"HOST_1": "h", "LC_ALL": "C.UTF-8"}, capture_output=True, check=True
    )
    expected = [*words, *(f"{word}h{word}" for word in words)]
    assert printed.stdout == "".join(f"{word}\n" for word in expected).encode()


def test_bash_takes_every_script() -> None:
    for case in matrix():
        for name, text in scripts(plan(case)).items():
            checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
            assert checked.returncode == 0, (case.id, name, checked.stderr)


def test_there_is_one_script_a_host_and_one_for_the_routers(tmp_path: Path) -> None:
    written = write(plan(Case("P+D", "sglang", hosts=2)), tmp_path)
    assert [path.name for path in written] == [
        "launch-HOST_1.sh", "launch-HOST_2.sh", "routers.sh", "routes.json",
    ]  # fmt: skip
    assert all(os.access(path, os.X_OK) == (path.suffix == ".sh") for path in written)
    # Its own flags only: the other host's server is in the other script.
    text = written[0].read_text()
    assert "--disaggregation-mode prefill" in text
    assert "decode" not in text


def test_hosts_that_are_not_named_must_be_given(tmp_path: Path) -> None:
    write(plan(Case("E+PD", "sglang", hosts=2)), tmp_path)
    env = {"PATH": os.environ["PATH"], "RUN_DIR": str(tmp_path / "run")}
    command = [tmp_path / "launch-HOST_2.sh"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "HOST_1: address of host 1 of the plan" in run.stderr


def test_a_plan_of_one_host_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "ENGINE_PORT", 18470)
    made = plan(Case(caches=True, replicas=2, share=0.5))
    small = made.model_copy(update={"caches": [c.model_copy(update={"gib": 0.01}) for c in made.caches]})
    write(small, tmp_path)
    fake, cornplug = tmp_path / "fake", tmp_path / "cornplug"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    cornplug.write_text(f'#!/bin/sh\nexec {sys.executable} -m cornplug.cli "$@"\n')
    for program in (fake, cornplug):
        program.chmod(0o755)
    run_dir, events = tmp_path / "run", tmp_path / "events"
    script = subprocess.Popen(
        [tmp_path / "launch-HOST_1.sh"],
        env=os.environ
        | {"VLLM": str(fake), "CORNPLUG": str(cornplug), "RUN_DIR": str(run_dir), "FAKE_EVENTS": str(events)}
        | {"CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    said = []
    for line in script.stdout:
        said.append(line)
        if "Ctrl-C" in line:
            break
    for port in (18470, 18471):
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    # They share a GPU: the second begins when the first has its memory.
    order = [line.split(":")[0] for line in said if ": process" in line or ": ready" in line]
    assert order == [
        name for name in ("store", "llm7-vit-EPD-nodes-0", "llm7-vit-EPD-nodes-1") for _ in (1, 2)
    ]
    script.send_signal(signal.SIGTERM)
    assert script.wait(30) == 143
    assert sorted(events.read_text().split()) == ["18470", "18471"]
    assert not (run_dir / "store.sock").exists()


def test_a_host_with_somebody_elses_server_only_says_so() -> None:
    made = plan(Case())
    group = made.groups[0].model_copy(
        update={"name": "tts-G", "tasks": "G", "engine": "external", "model": "org/it's speech"}
    )
    (text,) = scripts(made.model_copy(update={"groups": [group], "routes": []})).values()
    said = subprocess.run(["bash", "-u"], input=text, capture_output=True, text=True, check=True)
    assert "org/it's speech" in said.stdout


def test_a_script_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(plan(Case()), tmp_path)
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    fake.chmod(0o755)
    began = time.monotonic()
    run = subprocess.run(
        [tmp_path / "launch-HOST_1.sh"],
        env=os.environ | {"VLLM": str(fake), "RUN_DIR": str(tmp_path / "run"), "FAKE_FAILS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "no memory for the weights" in run.stderr
    assert time.monotonic() - began < 20
