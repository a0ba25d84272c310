"""docs/command-line.md, from each command's --help."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Final
from unittest import mock

from cornplug import cli

from .markdown import notice

# Widths, folders and devices of the machine that writes the page must not show in it.
_ENVIRONMENT: Final = {
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "CORNPLUG_RUNTIME_DIR": "/tmp/cornplug-UID",
    "XDG_CACHE_HOME": "/home/USER/.cache",
}
_SUBCOMMANDS: Final = {"store": ("purge",), "plan": ("init", "schema"), "profile": ("llm", "encoder")}
_WITHOUT_OPTIONS: Final = frozenset({"store"})
"""Commands that have subcommands only."""
_PURPOSE: Final = (
    "This page lists the flags of each `cornplug` command. `--help` explains them, with their units and "
    "defaults.\n[Configuration](configuration.md) has the flags of the engines (`--cornplug-*`)."
)
_OPTIONS: Final = re.compile(r"^(?:positional arguments|options):\n(?:  .*\n)*\n?", re.MULTILINE)
"""A group of arguments and their explanations."""


def page() -> str:
    """The text of docs/command-line.md."""
    parts = [f"# Command line\n\n{_PURPOSE}\n\n{notice('the help of each command')}\n"]
    for name in cli.COMMANDS:
        if name not in _WITHOUT_OPTIONS:
            parts.append(_section((name,)))
        parts += [_section((name, sub)) for sub in _SUBCOMMANDS.get(name, ())]
    return "\n".join(parts)


def _section(words: tuple[str, ...]) -> str:
    return f"## `{' '.join(('cornplug', *words))}`\n\n```text\n{_short(help_of(words))}```\n"


def _short(text: str) -> str:
    """A command's help without the explanations of its arguments."""
    return _OPTIONS.sub("", text).replace(" [-h]", "", 1).rstrip() + "\n"


def help_of(words: tuple[str, ...]) -> str:
    """Output of `cornplug WORDS --help`."""
    out = io.StringIO()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORNPLUG_")}
    with (
        mock.patch.dict(os.environ, {**clean, **_ENVIRONMENT}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        cli.main([*words, "--help"])
    return out.getvalue()
