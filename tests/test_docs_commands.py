"""Commands of README.md and docs/*.md: each parses, and each that can run on this machine runs.

A page's commands run in their order, in one folder. `NOT_RUN` says why others do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest
import test_examples
import yaml
from test_docs import PAGES, TREE

from cornplug import cli
from cornplug.apps import AppsFile
from cornplug.config import STORE_PROTOCOL, load
from cornplug.encoder_service import server_flags
from devkit.processes import StoreProcess
from devkit.sglang_engine import sglang_python

NOT_RUN: Final[Mapping[str, str]] = {
    "cornplug encoder": "serves until it is stopped",
    "cornplug launch": "starts engines",
    "cornplug profile": "measures a model on a GPU",
    "cornplug replan": "reads the metrics of an engine",
    "cornplug serve-store": "serves until it is stopped",
    "cornplug top": "shows a store until it is stopped",
    "cornplug warm": "sends requests to an engine",
    "curl": "sends a request to an engine",
    "docker compose": "needs Docker",
    "for name in store encoder vllm sglang; do docker build": "needs Docker",
    "head -c 32 /dev/urandom | install": "writes to /etc",
    "helm install": "needs Kubernetes",
    "kubectl": "needs Kubernetes",
    "pip": "needs a package index",
    "python -m dynamo.vllm": "needs Dynamo",
    "python -m sglang.launch_server": "starts an engine",
    "script/demo": "starts engines",
    "script/test": "runs these tests",
    "sglang serve": "starts an engine",
    "vllm serve": "starts an engine",
}
"""Beginning of a command -> why it does not run here."""
RUN: Final = frozenset({"chmod", "cornplug", "export", "head"})
"""Programs of commands that do run, in a temporary folder."""
HARMLESS: Final = frozenset({"--check", "--dry-run"})
"""Options with which a command of cornplug runs all the same: it starts and sends nothing."""
PLAN: Final = TREE / "examples" / "plan_and_launch" / "hand-made.toml"
DOCS: Final = [page for page in PAGES if page.parent == TREE / "docs" or page.name == "README.md"]
READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "json": json.loads,
    "python": lambda text: compile(text, "docs", "exec"),
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


class Command(NamedTuple):
    """A command of a page's shell block."""

    page: str
    text: str
    """As it is written, without its comment."""

    def words(self) -> list[str]:
        """Its words, without assignments before the program."""
        words = shlex.split(self.text, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        return words

    def programs(self) -> set[str]:
        """The programs that it starts, one after the other or in a pipe."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        tokens = [token for token in lexer if not re.match(r"[A-Z_]+=", token)]
        return {t for before, t in zip(["&&", *tokens], tokens, strict=False) if before in ("&&", "|", ";")}

    def not_run_as(self) -> str:
        """Its entry in `NOT_RUN`; empty if it runs here."""
        words = self.words()
        if words[0] == "cornplug" and HARMLESS.intersection(words):
            return ""
        text = re.sub(r"^(?:[A-Z_]+=\S+\s+)+", "", self.text)
        return max((start for start in NOT_RUN if f"{text} ".startswith(f"{start} ")), key=len, default="")


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page.name, language, text) for _, language, text in found]


def commands_in(block: Block) -> Iterator[Command]:
    """A block's commands. A command ends with a line, unless the line ends with \\ or amid quotes."""
    whole = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        whole += f"\n{line}" if whole else line.strip()
        try:
            words = shlex.split(whole, comments=True)
        except ValueError:
            continue  # amid quotes
        if words:
            comment = re.search(r"\s+#.*$", whole)
            without = whole[: comment.start()] if comment else whole
            yield Command(block.page, " ".join(without.split()))
        whole = ""
    assert not whole, f"{block.page}: open quotes in {whole!r}"


@cache
def commands() -> tuple[Command, ...]:
    """Every command in the shell blocks, which name no language, and in the units of systemd."""
    found = []
    for page in DOCS:
        for block in blocks(page):
            if not block.language:
                found += commands_in(block)
            found += [
                Command(page.name, line.rpartition("/bin/")[2])
                for line in re.findall(r"^ExecStart=(.*)$", block.text, re.MULTILINE)
            ]
    return tuple(found)


class ParsedError(Exception):
    """Ends a command whose arguments were parsed."""


def parse(words: Sequence[str]) -> None:
    """Parse a command of cornplug and run nothing. Raises SystemExit if its own parser refuses it."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if self.prog != "cornplug":
            raise ParsedError
        return found

    if words[0] == "encoder":  # its other modules take seconds to import
        server_flags.build_parser("").parse_args(words[1:])
        return
    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args), pytest.raises(ParsedError):
        cli.main(words)


def test_docs_commands_of_cornplug_parse() -> None:
    found = [command for command in commands() if command.words()[0] == "cornplug"]
    assert {command.words()[1] for command in found} > {"encoder", "launch", "plan", "serve-store", "store"}
    refused = []
    for command in found:
        try:
            parse(command.words()[1:])
        except SystemExit:
            refused.append(command)
    assert not refused


@pytest.mark.parametrize("words", ["encoder --modle m", "plan", "launch a.toml --dri-run", "lunch a.toml"])
def test_docs_command_that_does_not_parse_is_seen(words: str) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_docs_commands_and_their_flags_are_in_the_reference(page: Path) -> None:
    """Those in backticks too, and cornplug's flags of vLLM."""
    found = test_examples.commands(page.read_text())
    assert {
        " ".join(words): unknown for words in found if (unknown := test_examples.unknown_words(words))
    } == {}


def test_docs_table_of_commands_not_run_is_of_commands_that_exist() -> None:
    used = {entry for command in commands() if (entry := command.not_run_as())}
    assert used == NOT_RUN.keys()


def test_docs_commands_run_or_say_why_not() -> None:
    """A page marks a block of output as `text`."""
    unknown = [
        command for command in commands() if not command.not_run_as() and not command.programs() <= RUN
    ]
    assert not unknown


def test_docs_scripts_exist() -> None:
    scripts = {word for command in commands() if (word := command.words()[0]).startswith("script/")}
    assert scripts
    assert all((TREE / script).exists() for script in scripts)


def test_docs_blocks_are_of_their_language() -> None:
    found = [block for page in DOCS for block in blocks(page)]
    assert {block.language for block in found} <= {"", "ini", "text", *READERS}
    for block in found:
        if reader := READERS.get(block.language):
            reader(block.text)


def whole_digest(abbreviated: re.Match[str]) -> str:
    return f"sha256:{hashlib.sha256(abbreviated[0].encode()).hexdigest()}"


def test_docs_settings_files_are_read(tmp_path: Path) -> None:
    """The TOML with components is an apps file, and any other one is a file of settings."""
    for block in (block for page in DOCS for block in blocks(page) if block.language == "toml"):
        file = tmp_path / "file.toml"
        # Digests of keys are abbreviated.
        file.write_text(re.sub(r"sha256:\w*\.\.\.", whole_digest, block.text))
        if "[[components]]" in block.text:
            assert AppsFile.read(file).applications
        else:
            load(environ={"CORNPLUG_CONFIG": str(file)})


# -- running -----------------------------------------------------------------------------------


def lay_files(page: str, folder: Path) -> None:
    """Write the files that a page's commands read and that its reader has."""
    (folder / "benchmarks").symlink_to(TREE / "benchmarks")
    (folder / "prompts.jsonl").write_text('{"model": "model", "prompt": "What is a cache?"}\n')
    if page == "README.md":
        (folder / "plan.toml").write_bytes(PLAN.read_bytes())
    names = {"deploy-one-host.md": ("apps.toml", "new.toml")}
    for name in names.get(page, ()):
        settings = next(block for block in blocks(TREE / "docs" / page) if block.language == "toml")
        (folder / name).write_text(settings.text)


RUNNING: Final = sorted({command.page for command in commands() if not command.not_run_as()})


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUNNING)
def test_docs_commands_run(page: str, short_path: Path, tmp_path: Path) -> None:
    lay_files(page, tmp_path)
    run = short_path / "cornplug"
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CORNPLUG_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CORNPLUG_RUNTIME_DIR": str(run),
        "XDG_CACHE_HOME": str(short_path / "cache"),
    }
    lines = [command.text for command in commands() if command.page == page and not command.not_run_as()]
    store = StoreProcess(run / f"store-{STORE_PROTOCOL}.sock", env=env)
    with ExitStack() as ends:
        if any("store purge" in line for line in lines):
            ends.enter_context(store)
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


# -- command lines of engines ------------------------------------------------------------------

_PARSE_VLLM: Final = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()
for words in json.load(sys.stdin):
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        parser.parse_args(words)
    except SystemExit:
        print("refused:", *words)
"""
_PARSE_SGLANG: Final = """
import argparse, json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.load(sys.stdin):
    try:
        parser.parse_args(words)
    except SystemExit:
        print("refused:", *words)
"""


def refused(program: str, python: Path, lines: Sequence[Sequence[str]]) -> list[str]:
    """Those of the engine's command lines that its own parser refuses."""
    assert lines
    done = subprocess.run(
        [str(python), "-c", program], input=json.dumps(lines), capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if line.startswith("refused:")]


@pytest.mark.more
def test_docs_command_lines_of_vllm_parse() -> None:
    lines = [words[1:] for command in commands() if (words := command.words())[:2] == ["vllm", "serve"]]
    wrong = ["serve", "MODEL", "--cornplug-stoer", "x"]
    assert refused(_PARSE_VLLM, Path(sys.executable), [*lines, wrong]) == ["refused: " + " ".join(wrong)]


@pytest.mark.more
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
def test_docs_command_lines_of_sglang_parse() -> None:
    starts = (["python", "-m", "sglang.launch_server"], ["sglang", "serve"])
    lines = [
        words[len(start) :]
        for command in commands()
        for start in starts
        if (words := command.words())[: len(start)] == start
    ]
    wrong = ["--model-path", "MODEL", "--cornplug-stoer", "x"]
    python = sglang_python()
    assert python is not None
    assert refused(_PARSE_SGLANG, python, [*lines, wrong]) == ["refused: " + " ".join(wrong)]
