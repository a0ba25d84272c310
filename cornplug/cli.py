"""The command `cornplug`: a table of commands, each loaded when it is asked for.

Knows nothing of a command's work. A command is `main(argv) -> exit status`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from cornplug import __version__
from cornplug.errors import CornplugError


class CliCommand(NamedTuple):
    target: str
    """`module:function`, imported late: `cornplug --help` must not load torch."""
    help: str


COMMANDS: Mapping[str, CliCommand] = {
    "serve-store": CliCommand(
        "cornplug.store.daemon.main:main", "run the cache daemon (the store) of this host"
    ),
    "store": CliCommand("cornplug.commands.store_command:main", "purge entries of the running store"),
    "top": CliCommand("cornplug.commands.top:main", "watch the running store: fill, hits, evictions"),
    "warm": CliCommand("cornplug.commands.warm:main", "put an app's prompts and images into the store"),
    "encoder": CliCommand(
        "cornplug.encoder_service.server:main", "run the shared encoder service (vision and audio towers)"
    ),
    "plan": CliCommand("cornplug.planner.plan_command:main", "plan what to run where, from SLOs and prices"),
    "launch": CliCommand(
        "cornplug.commands.launch_command:main", "start an apps file or a plan on this host"
    ),
    "replan": CliCommand(
        "cornplug.planner.replan.replan_command:main", "compare the observed load with a plan"
    ),
    "replay": CliCommand(
        "cornplug.replay.replay_command:main", "replay a trace against a store of another size or other rules"
    ),
    "profile": CliCommand(
        "cornplug.planner.profiler.profile_command:main", "measure a component's times here"
    ),
    "fingerprint": CliCommand(
        "cornplug.commands.fingerprint:main", "print the fingerprints of checkpoints and their common parts"
    ),
    "doctor": CliCommand(
        "cornplug.commands.doctor:main", "check this host's set-up, with a remedy for each fault"
    ),
}

# Top-level module -> cornplug's extra that brings it.
EXTRAS: Mapping[str, str] = {
    "torch": "encoder",
    "transformers": "encoder",
    "safetensors": "encoder",
    "fastapi": "encoder",
    "uvicorn": "encoder",
    "av": "encoder",
    "zmq": "encoder",
    "multipart": "encoder",
    "python_multipart": "encoder",
    "pulp": "planner",
    "highspy": "planner",
    "jinja2": "planner",
    "matplotlib": "replay",
    "vllm": "vllm",
    "sglang": "sglang",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, or 2 for a CornplugError (one line on stderr)."""
    args = _parser().parse_args(argv)
    try:
        return _load(COMMANDS[args.command].target)(args.args)
    except CornplugError as e:
        print(f"cornplug {args.command}: {e}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        extra = EXTRAS.get((e.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"cornplug {args.command}: needs {e.name}, which is not installed. "
            f"Run: pip install 'cornplug[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _load(target: str) -> Callable[[list[str]], int]:
    module, _, function = target.partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="cornplug",
        description="Share image embeddings and prefix KV cache between vLLM and SGLang servers of a host.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
        + "\n\n'cornplug COMMAND --help' explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cornplug {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
