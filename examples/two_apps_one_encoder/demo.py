"""Two apps, two language models, one vision tower: the shared work, request by request.

The same requests go first to stock `vllm serve`, then to engines with `--kv-connector
cornplug` beside one `cornplug encoder`. Exit status: 0 when every answer is stock's and the
tower ran exactly once an image; 1 when not; 2 when something did not start; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from checkpoints import App, Apps, make
from host import Engine, Host
from ledger import Ledger, ask, flush
from questions import Request, Sitting, sittings
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from tables import models, record, requests, totals

from cornplug.errors import CornplugError
from devkit.engines import Answer, RequestFailed

_FAILURES = (RequestFailed, CornplugError, httpx.HTTPError, RuntimeError, OSError)

_TREE: Final = Path(__file__).parents[2]
_RECORD: Final = _TREE / "docs" / "demo.json"


class Demo:
    """The acts in their order, and the lines printed meanwhile."""

    def __init__(self, host: Host, console: Console, progress: Progress, *, save: bool = False) -> None:
        self._host = host
        self._machine = _machine() if save else None
        self._console = console
        self._progress = progress
        self._began = time.monotonic()

    def run(self) -> bool:
        """Play all acts and print the tables. Whether everything is as promised."""
        with self._step("making three small checkpoints"):
            apps = make(self._host.folder / "models")
        self._console.print(models(tuple(apps)))
        self._say("Stock first: vllm serve without cornplug answers every request, for comparison.")
        stock: dict[Request, Answer] = {}
        for sitting in sittings(apps):
            stock |= self._stock(sitting)
        return self._shared(apps, stock)

    def _stock(self, sitting: Sitting) -> dict[Request, Answer]:
        answers = {}
        with self._engines(sitting.apps, shared=False) as engines:
            for request in self._each(sitting.warm_up, "warm-up (stock)"):
                ask(engines[request.app.name], request)
                flush(engines[request.app.name])
            for request in self._each(sitting.requests, "questions (stock)"):
                answers[request] = ask(engines[request.app.name], request)
                flush(engines[request.app.name])
        return answers

    def _shared(self, apps: Apps, stock: dict[Request, Answer]) -> bool:
        self._say("Now with cornplug: one encoder service for all models, and the store that engines start.")
        with ExitStack() as stack:
            with self._step("starting cornplug encoder for three models"):
                encoder = stack.enter_context(self._host.encoder(tuple(apps)))
            ledger = Ledger(encoder.url)
            for number, sitting in enumerate(sittings(apps)):
                if number:
                    self._say("Those engines are gone. A fresh one for helpdesk, and the third app's:")
                self._sitting(sitting, ledger, stock)
            stat = self._host.store_stat()
            faults = ledger.faults()
        self._console.print(requests(ledger.rows), totals(ledger, stat))
        for fault in faults:
            self._console.print(f"[bold red]NOT as promised:[/] {fault}")
        if self._machine and not faults:
            _RECORD.write_text(json.dumps({"machine": self._machine, **record(ledger)}, indent=1) + "\n")
        minutes = (time.monotonic() - self._began) / 60
        verdict = "[bold red]failed" if faults else "[bold green]all as promised"
        self._console.print(f"{verdict}[/], after {minutes:.1f} minutes")
        return not faults

    def _sitting(self, sitting: Sitting, ledger: Ledger, stock: dict[Request, Answer]) -> None:
        without_store = self._host.store_pid() is None
        with self._engines(sitting.apps, shared=True) as engines:
            if without_store:
                self._say(f"No store ran; an engine has started one (process {self._host.store_pid()}).")
            for request in self._each(sitting.warm_up, "warm-up"):
                ledger.warm_up(engines[request.app.name], request)
            for request in self._each(sitting.requests, "questions"):
                ledger.ask(engines[request.app.name], request, stock[request])

    @contextmanager
    def _engines(self, apps: Sequence[App], *, shared: bool) -> Iterator[dict[str, Engine]]:
        """App name -> its engine, for as long as the block lasts."""
        names = " and ".join(app.name for app in apps)
        flags = " --kv-connector cornplug" if shared else ""
        with ExitStack() as stack:
            with self._step(f"starting vllm serve{flags} for {names}"):
                engines = self._host.engines(stack, apps, shared=shared)
            yield {engine.app.name: engine for engine in engines}

    # -- printed lines -----------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}")

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        task = self._progress.add_task(what, total=None)
        try:
            yield
        finally:
            self._progress.remove_task(task)
        self._console.print(f"  {what}: {time.monotonic() - began:.0f} s")

    def _each(self, asked: Sequence[Request], what: str) -> Iterator[Request]:
        with self._step(f"{len(asked)} {what}"):
            task = self._progress.add_task(what, total=len(asked))
            try:
                for request in asked:
                    words = f"{request.app.name}: {request.image.name}"
                    self._progress.update(task, description=words)
                    yield request
                    self._progress.advance(task)
            finally:
                self._progress.remove_task(task)


def _machine() -> dict[str, Any]:
    """The measuring machine, before the demo's own load."""
    asked = [sys.executable, str(_TREE / "benchmarks" / "machine.py")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    described: dict[str, Any] = json.loads(said.stdout)
    return described


def main(argv: Sequence[str]) -> int:
    """Run the demo; its exit status."""
    parser = argparse.ArgumentParser(prog="script/demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave its folder, with the logs, in place")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write docs/demo.json: script/docs makes a page of it",
    )
    options = parser.parse_args(argv)
    # Also where a shell that runs this in the background has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=150)  # tables whole in a file
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    status = 0
    try:
        with (
            Host() as host,
            Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress,
        ):
            host.keep = options.keep
            try:
                status = 0 if Demo(host, console, progress, save=options.save).run() else 1
            except _FAILURES as e:
                console.print(f"[bold red]the demo could not go on:[/] {type(e).__name__}", soft_wrap=True)
                console.print(str(e), markup=False, soft_wrap=True)
                status = 2
            if status:
                host.keep = True
                console.print(f"logs are in {host.folder}", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
