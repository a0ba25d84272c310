"""docs/command-line.md, from each command's --help."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Final
from unittest import mock

from cornplug import cli
from cornplug.engine_common.shared_flags import SETTINGS
from cornplug.sglang_hooks.flags import ENABLE

from .markdown import notice, table

# Widths, folders and devices of the machine that writes the page must not show in it.
_ENVIRONMENT: Final = {
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "CORNPLUG_RUNTIME_DIR": "/tmp/cornplug-UID",
    "XDG_CACHE_HOME": "/home/USER/.cache",
}
_SUBCOMMANDS: Final = {"store": ("purge",), "plan": ("init", "schema"), "profile": ("llm", "encoder")}
_PURPOSE: Final = (
    "This page lists the flags that cornplug adds to engines, and the help of each `cornplug` command."
)
_ENGINES: Final = """## Engines

`--kv-connector cornplug` turns on cornplug in vLLM, and `{enable}` does so in SGLang. Both engines
then accept these flags:
"""


def page() -> str:
    """The text of docs/command-line.md."""
    parts = [
        f"# Command line\n\n{_PURPOSE}\n\n{notice('the help of each command')}\n",
        _ENGINES.format(enable=ENABLE),
    ]
    rows = [(f"`{flag}`", f"`{setting}`", text) for flag, (setting, text) in SETTINGS.items()]
    parts.append(table(("flag", "setting", "meaning"), rows) + "\n")
    parts.append(_section(()))
    for name in cli.COMMANDS:
        parts.append(_section((name,)))
        parts += [_section((name, sub)) for sub in _SUBCOMMANDS.get(name, ())]
    return "\n".join(parts)


def _section(words: tuple[str, ...]) -> str:
    return f"## `{' '.join(('cornplug', *words))}`\n\n```text\n{help_of(words)}```\n"


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
