"""commands.txt: every command of a plan, as a shell reads it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.planner.launch.command_lines import commands, quote, render, write

from ..plans import Case, matrix, plan


@settings(max_examples=5)
@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\n"))
        | st.sampled_from(["a b", "$HOME", "`id`", "$(id)", '"', "\\", "'", "!x", "*", '{"a": "b"}', ""]),
        min_size=20,
        max_size=40,
    )
)
def test_quoted_any_word_is_read_back_by_bash(words: list[str]) -> None:
    """Names of a plan may hold any character: only the plan's own variables are expanded."""
    with_variables = [f"{word}${{HOST_1}}{word}" for word in words]
    shown = "\n".join(f"printf '%s\\n' {quote(word)}" for word in [*words, *with_variables])
    printed = subprocess.run(
        ["bash", "-c", shown], env={"HOST_1": "h", "LC_ALL": "C.UTF-8"}, capture_output=True, check=True
    )
    expected = [*words, *(f"{word}h{word}" for word in words)]
    assert printed.stdout == "".join(f"{word}\n" for word in expected).encode()


def test_command_list_is_valid_bash_with_one_line_a_process() -> None:
    values = {"RUN_DIR": "/run", "PLAN_DIR": "/plan", "SECRET_FILE": "/etc/cornplug/secret"}
    values |= {f"HOST_{n}": f"10.0.0.{n}" for n in range(1, 9)}
    exports = "".join(f"{name}={value}\n" for name, value in values.items())
    for case in matrix():
        made = plan(case)
        lines = [line for line in render(made).splitlines() if line and not line.startswith("#")]
        shown = exports + "".join(f"printf '%s\\0' {line}; echo\n" for line in lines)
        printed = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
        words = [line.split("\0")[:-1] for line in printed.splitlines()]
        argvs = [list(c.substitute(values).argv) for c in commands(made) if c.argv]
        assert len(words) == len(argvs), case.id
        assert all(any(w[-len(argv) :] == argv for w in words) for argv in argvs), case.id


def test_command_list_of_two_hosts_groups_servers_by_host_and_routers_last() -> None:
    listed = render(plan(Case("P+D", "sglang", hosts=2)))
    first, second = listed.index("# Host HOST_1"), listed.index("# Host HOST_2")
    routers = listed.index("# Routers, to be started when all hosts are ready")
    assert listed.count("#   HOST_1: a host's address") == 1
    assert "--disaggregation-mode prefill" in listed[first:second]
    assert "--disaggregation-mode decode" in listed[second:routers]
    assert "sglang_router" in listed[routers:]


def test_command_list_of_distant_encoders_says_how_to_make_and_copy_the_secret() -> None:
    far, near = (render(plan(Case("E+PD", hosts=hosts))) for hosts in (2, 1))
    assert far.index("#   SECRET_FILE: ") < far.index("chmod 600 secret") < far.index("# Host HOST_1")
    assert "scp -p" in far
    assert "cornplug[remote]" in far
    assert far.index("# Host HOST_1") < far.index("# Host HOST_2")
    assert "SECRET_FILE" not in near


def test_write_files_are_the_ones_that_commands_name(tmp_path: Path) -> None:
    written = write(plan(Case("P+D", classes=True)), tmp_path)
    assert [path.name for path in written] == ["commands.txt", "routes.json", "qos.toml"]


def test_command_list_external_server_is_a_remark_without_command() -> None:
    made = plan(Case())
    group = made.groups[0].model_copy(
        update={"name": "tts-G", "tasks": "G", "engine": "external", "model": "org/it's\nspeech"}
    )
    listed = render(made.model_copy(update={"groups": [group], "routes": []}))
    assert "# Start your own server of org/it's speech here" in listed
    assert not [line for line in listed.splitlines() if line and not line.startswith("#")]


def test_command_list_line_with_cores_uses_taskset() -> None:
    listed = render(plan(Case(gpu="cpu-core")))
    (served,) = [line for line in listed.splitlines() if "vllm serve" in line]
    assert "taskset" in shlex.split(served)
