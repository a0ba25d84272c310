"""File `commands.txt` with the command lines of all processes of a deployment, for reading and copying."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cornplug.planner.launch.addresses import hosts
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files, name_of
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Deployment

FILE_NAME: Final = "commands.txt"
_VARIABLE: Final = re.compile(r"\$\{[A-Z0-9_]+\}")


def write(deployment: Deployment, folder: Path, *, transfer: Transfer = "nixl") -> list[Path]:
    """Write commands.txt and the files to which its commands refer, and return the paths of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {FILE_NAME: render(deployment, transfer=transfer), **files(deployment, transfer=transfer)}
    for name, content in found.items():
        (folder / name).write_text(content)
    return [folder / name for name in found]


def render(deployment: Deployment, *, transfer: Transfer = "nixl") -> str:
    """Return the text of commands.txt: the commands of each host in start order, and then the routers."""
    every = commands(deployment, transfer=transfer)
    lines = [
        f"# Processes of the plan {_one_line(deployment.name)!r}, in start order.",
        "# `cornplug launch plan.json` starts them, waits until they are ready, and stops them in order.",
        *_variables(every),
    ]
    for host in dict.fromkeys(hosts(deployment).values()):
        local = [c for c in every if c.host == host and c.kind != "router"]
        lines += ["", f"# Host {host.strip('${}')}", *_lines(local)] if local else []
    routers = [c for c in every if c.kind == "router"]
    lines += ["", "# Routers, to be started when all hosts are ready", *_lines(routers)] if routers else []
    return "\n".join(lines) + "\n"


def shell_line(command: LaunchCommand) -> str:
    """Return a command as a line for a shell, with its environment, cores and arguments."""
    words = ["env", *(f"{name}={quote(value)}" for name, value in sorted(command.env.items()))]
    words = words if command.env else []
    if command.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, command.cores))]
    return " ".join([*words, *map(quote, command.argv)])


def quote(word: str) -> str:
    """Quote a word for a shell, so that the shell expands only the variables of commands in the word."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    parts = _VARIABLE.split(word)
    escaped = [re.sub(r'([\\\\"`$])', r"\\\1", part) for part in parts]
    filled = "".join(a + b for a, b in zip(escaped, [*_VARIABLE.findall(word), ""], strict=True))
    return f'"{filled}"'


def unresolved_hosts(command: LaunchCommand) -> list[str]:
    """Return the names of hosts ("HOST_1") for which the command still contains variables."""
    texts = (*command.argv, *command.env.values(), command.health or "")
    found = {name.strip("${}") for text in texts for name in _VARIABLE.findall(text)}
    return sorted(name for name in found if name.startswith("HOST_"))


def _variables(all_commands: Sequence[LaunchCommand]) -> Iterator[str]:
    texts = [text for c in all_commands for text in (*c.argv, *c.env.values())]
    known = {
        "RUN_DIR": "a folder for sockets, the same for all processes of a host",
        "PLAN_DIR": "the folder of this file",
        "SECRET_FILE": "a file of 32 bytes, the same on all hosts",
        **dict.fromkeys(sorted({n for c in all_commands for n in unresolved_hosts(c)}), "a host's address"),
    }
    used = [name for name in known if any(f"${{{name}}}" in text for text in texts)]
    if used:
        yield "# To run a command by hand, first set these variables:"
        yield from (f"#   {name}: {known[name]}" for name in used)
    if "SECRET_FILE" in used:
        yield "# Engines use encoder services on other hosts. The secret seals their messages."
        yield "# Create it once:"
        yield "#   head -c 32 /dev/urandom > secret && chmod 600 secret"
        yield "# Copy it to each host with its mode (scp -p), and run there: pip install 'cornplug[remote]'"


def _lines(some: Sequence[LaunchCommand]) -> Iterator[str]:
    for command in some:
        yield "\n".join(["", f"# {name_of(command)}", *(f"# {_one_line(r)}" for r in command.remarks)])
        if command.argv:
            yield shell_line(command)


def _one_line(text: str) -> str:
    """Return a text on a single line, for a comment."""
    return " ".join(text.split())
