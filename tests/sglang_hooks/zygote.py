"""Processes of SGLang, forked from one that has imported it and nothing of ours.

The import takes each new process some five seconds of a core. Plugins are loaded and arguments
read after the fork, as in a process of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_IMPORTS = "sglang.launch_server", "sglang.srt.managers.scheduler", "sglang.srt.managers.tokenizer_manager"

_SERVER = f"""
import gc, json, os, runpy, sys
import {", ".join(_IMPORTS)}
ours = [name for name in sys.modules if name.startswith("cornplug")]
assert not ours, ours
gc.freeze()  # A collection would copy each page that the processes share.
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if not (pid := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for stream, path in enumerate((os.devnull, *ask["outputs"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
os.environ.clear()
os.environ.update(ask["env"])
sys.argv[1:] = ask["argv"]
if ask["module"]:
    runpy.run_module(ask["module"], run_name="__main__", alter_sys=True)
else:
    exec(ask["code"], {{"__name__": "__main__"}})
"""


class Zygote:
    """Runs one process at a time; `folder` is for their output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._said(100) == "ready"

    def run(
        self,
        *argv: str,
        module: str = "",
        code: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 100,
    ) -> subprocess.CompletedProcess[str]:
        """As `python -m module ARGV` or `python -c code ARGV` with `env` besides this process's own."""
        outputs = [self._folder / "stdout", self._folder / "stderr"]
        for output in outputs:
            output.unlink(missing_ok=True)
        ask = {
            "argv": argv,
            "module": module,
            "code": code,
            "env": {**os.environ, **(env or {})},
            "outputs": [str(output) for output in outputs],
        }
        to_server = self._pipe(self._server.stdin)
        to_server.write(json.dumps(ask) + "\n")
        to_server.flush()
        status = int(self._said(timeout_s))
        stdout, stderr = (output.read_text() if output.exists() else "" for output in outputs)
        command: Sequence[str] = (module or "-c", *argv)
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    def close(self) -> None:
        """End it, with a process that is still running."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            self._pipe(pipe).close()

    def _said(self, timeout_s: float) -> str:
        from_server = self._pipe(self._server.stdout)
        ready, _, _ = select.select([from_server], [], [], timeout_s)
        if not ready:
            raise TimeoutError(f"no answer within {timeout_s} s")
        return from_server.readline().strip()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
