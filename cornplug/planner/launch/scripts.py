"""A plan's commands as bash: one script a host, and one for the routers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cornplug.planner.launch.command_lines import LaunchCommand, commands, files
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Plan

ROUTERS: Final = "routers.sh"
READY_S: Final = 1800
"""Longest time that a server may take to load: hundreds of gigabytes from a slow disk."""

_VARIABLE: Final = re.compile(r"\$\{[A-Z0-9_]+\}")
_PROGRAMS: Final = {
    "vllm": ("VLLM", "vllm"),
    "python": ("SGLANG_PYTHON", "python"),
    "cornplug": ("CORNPLUG", "cornplug"),
    "lmcache": ("LMCACHE", "lmcache"),
    "vllm-router": ("VLLM_ROUTER", "vllm-router"),
}
"""What a command begins with -> the variable that may name it otherwise, as each engine lives in an
environment of its own."""

_HEAD: Final = """\
#!/usr/bin/env bash
# {what} of the plan {name}, made by `cornplug plan`. Ends what it started when it is stopped.
set -euo pipefail

RUN_DIR=${{RUN_DIR:-${{XDG_RUNTIME_DIR:-/tmp}}/cornplug-$(id -u)}}
"""

_PLAN_DIR: Final = 'PLAN_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'

_FUNCTIONS: Final = """\
mkdir -p "$RUN_DIR"
chmod 700 "$RUN_DIR"

running=()
names=()

finish() { # in the order opposite to that in which they were started
    trap - EXIT INT TERM
    local i
    for ((i = ${#running[@]} - 1; i >= 0; i--)); do
        kill -TERM "${running[i]}" 2>/dev/null || true
        wait "${running[i]}" 2>/dev/null || true
    done
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() { # start NAME COMMAND...
    local name=$1
    shift
    "$@" >"$RUN_DIR/$name.log" 2>&1 &
    running+=("$!")
    names+=("$name")
    echo "$name: process $!, log $RUN_DIR/$name.log"
}

still_running() { # still_running NAME: fails, with the end of its log, when it has ended
    local i
    for i in "${!names[@]}"; do
        if [[ ${names[i]} == "$1" ]] && ! kill -0 "${running[i]}" 2>/dev/null; then
            echo "$1 has ended; the end of its log:" >&2
            tail -n 40 "$RUN_DIR/$1.log" >&2
            return 1
        fi
    done
}

ready() { # ready NAME TEST...: waits until the test holds
    local name=$1 deadline=$((SECONDS + @READY_S@))
    shift
    until "$@" >/dev/null 2>&1; do
        still_running "$name" || exit 1
        if ((SECONDS > deadline)); then
            echo "$name is not ready after @READY_S@ s: see $RUN_DIR/$name.log" >&2
            exit 1
        fi
        sleep 1
    done
    echo "$name: ready"
}

answers() { # answers URL
    curl --fail --silent --max-time 2 "$1"
}
"""

_TAIL: Final = """\
echo "all of this host runs; Ctrl-C ends it"
while true; do
    for name in "${names[@]}"; do
        still_running "$name" || exit 1
    done
    sleep 2
done
"""


def write(plan: Plan, folder: Path, *, transfer: Transfer = "nixl") -> list[Path]:
    """Write launch scripts, one a host, and what they refer to; the paths, in the order to run them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in (scripts(plan, transfer=transfer) | files(plan, transfer=transfer)).items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
        paths.append(path)
    return paths


def scripts(plan: Plan, *, transfer: Transfer = "nixl") -> dict[str, str]:
    """Text of every script by its file's name: hosts in the plan's order, the routers last."""
    all_of_them = commands(plan, transfer=transfer)
    found = {}
    for host in dict.fromkeys(command.host for command in all_of_them):
        here = [c for c in all_of_them if c.host == host and c.kind != "router"]
        if here:
            found[f"launch-{_file_name(host)}.sh"] = _script(plan, f"The part on {_plain(host)}", here)
    routers = [c for c in all_of_them if c.kind == "router"]
    if routers:
        found[ROUTERS] = _script(plan, "The routers", routers)
    return found


def name_of(command: LaunchCommand) -> str:
    """Of a command's log and messages: what it runs, without signs that a file's name cannot have."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", command.group).strip("-")
    if command.kind in ("store", "router"):
        return plain
    return f"{plain}-{command.replica}" + (f"-rank{command.rank}" if command.rank else "")


def quoted(word: str) -> str:
    """A word for bash, in which our variables are expanded and nothing else is."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    parts = _VARIABLE.split(word)
    escaped = [re.sub(r'([\\\\"`$])', r"\\\1", part) for part in parts]
    filled = "".join(a + b for a, b in zip(escaped, [*_VARIABLE.findall(word), ""], strict=True))
    return f'"{filled}"'


def line(command: LaunchCommand) -> str:
    """One command, as `start` takes it."""
    words = ["env", *(f"{name}={quoted(value)}" for name, value in sorted(command.env.items()))]
    words = [" \\\n    ".join(words), "\\\n   "] if command.env else []
    if command.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, command.cores))]
    variable, _ = _PROGRAMS[command.argv[0]]
    return " ".join([*words, f'"${variable}"', *_wrapped(command.argv[1:])])


def _wrapped(words: Sequence[str]) -> list[str]:
    """A flag a line: a line of forty flags cannot be read, nor changed by hand."""
    return [f"\\\n    {quoted(word)}" if word.startswith("--") else quoted(word) for word in words]


def _script(plan: Plan, what: str, here: Sequence[LaunchCommand]) -> str:
    used = [c for c in here if c.argv]
    if not used:
        remarks = [remark for command in here for remark in command.remarks]
        return "\n".join(["#!/usr/bin/env bash", *(f"echo {shlex.quote(r)}" for r in remarks), ""])
    parts = [_HEAD.format(what=what, name=_comment(plan.name)), *_variables(plan, used), ""]
    parts += [_FUNCTIONS.replace("@READY_S@", str(READY_S))]
    later: list[str] = []
    for command in here:
        parts += [f"# {_comment(remark)}" for remark in command.remarks]
        if command.argv:
            parts.append(f"start {name_of(command)} {line(command)}")
            at_once = command.beside_others or command.kind in ("store", "encoder")
            (parts if at_once else later).extend(_wait(command))
        parts.append("")
    return "\n".join([*parts, *later, "", _TAIL])


def _variables(plan: Plan, used: Sequence[LaunchCommand]) -> list[str]:
    programs = {_PROGRAMS[c.argv[0]] for c in used}
    texts = [text for c in used for text in (*c.argv, *c.env.values(), c.health or "")]
    named = sorted({name for text in texts for name in _hosts_in(text)})
    one = sum(nodes.count for nodes in plan.nodes) == 1
    lines = [_PLAN_DIR] if any("${PLAN_DIR}" in text for text in texts) else []
    lines += [f"{variable}=${{{variable}:-{program}}}" for variable, program in sorted(programs)]
    for name in named:
        given = ":-127.0.0.1" if one else f":?address of host {name.removeprefix('HOST_')} of the plan"
        lines.append(f"{name}=${{{name}{given}}}")
    return lines


def _hosts_in(text: str) -> list[str]:
    return [found.strip("${}") for found in _VARIABLE.findall(text) if found.startswith("${HOST_")]


def _wait(command: LaunchCommand) -> list[str]:
    if command.health is not None:
        return [f"ready {name_of(command)} answers {quoted(command.health)}"]
    if command.socket is not None:
        return [f"ready {name_of(command)} test -S {quoted(command.socket)}"]
    return []


def _file_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", _plain(host))


def _plain(host: str) -> str:
    return host.strip("${}")


def _comment(text: str) -> str:
    """Nothing of a plan leaves its comment's line."""
    return " ".join(text.split())
