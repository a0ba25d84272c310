"""Five requests without cornplug and with it: a new image, three that share work, and a killed store.

Two apps on vLLM have language models of their own and one vision tower. Stock engines and engines with
cornplug answer the same requests in turns. Exit status: 0 when every answer is stock's and every request
that shares work is faster; 1 when not; 2 when something did not start; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from host import DTYPE, Host, start
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cornplug.errors import CornplugError
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, EngineServer, RequestFailed, photos, wait_until
from devkit.sglang_engine import sglang_python

_TREE: Final = Path(__file__).parents[2]
_RECORD: Final = _TREE / "docs" / "demo.json"
_FAILURES = (RequestFailed, CornplugError, httpx.HTTPError, RuntimeError, OSError)

NEW, SECOND, FRESH, SGLANG, KILL = (
    "new image",
    "second app, same image",
    "fresh engine, 1,500-token prefix",
    "SGLang continues vLLM's prefix",
    "engine during store kill",
)
SHARING: Final = (SECOND, FRESH, SGLANG)
ROUNDS: Final = 3
_TOKENS: Final = 8
# A tower whose pass and a language model whose prefill of 1,500 tokens cost seconds on two cores.
_TOWER: Final[Mapping[str, Any]] = {"depth": 6, "embed_dim": 1024, "num_heads": 16, "mlp_ratio": 4}
_HELPDESK: Final[Mapping[str, Any]] = {"hidden_size": 1536, "layers": 8, "heads": 24, "kv_heads": 4}
_CATALOGUE: Final[Mapping[str, Any]] = {"hidden_size": 512, "layers": 4, "heads": 8}
_IMAGES: Final = ("rocket.jpg", "astronaut.png", "coffee.png", "camera.png")
"""One image a round, and one to warm up with."""
_PAUSE_S: Final = 1.1
"""Before each timed request: vLLM's workers poll without a pause for a second after their last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request, answered by a stock engine and by an engine with cornplug."""

    stock: Answer
    cornplug: Answer
    embeddings: int
    """Embeddings that the engine received."""
    tower_passes: int
    """Tower passes of the encoder service."""
    tokens: int
    """Prompt tokens whose KV came from the store."""

    @property
    def same(self) -> bool:
        return self.stock.token_ids == self.cornplug.token_ids


@dataclass(slots=True)
class Results:
    """The samples of each row, in the order of the table."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def medians(self, row: str) -> tuple[float, float]:
        """(stock, cornplug) seconds to the first token."""
        found = self.samples[row]
        stock = statistics.median(s.stock.ttft_s for s in found)
        return stock, statistics.median(s.cornplug.ttft_s for s in found)

    @property
    def total(self) -> tuple[float, float]:
        """(stock, cornplug) sums of the rows' medians."""
        stock, cornplug = zip(*map(self.medians, self.samples), strict=True)
        return sum(stock), sum(cornplug)

    def faults(self) -> list[str]:
        """Everything that makes the demo a failure; empty when it succeeded."""
        found = []
        for row, samples in self.samples.items():
            stock, cornplug = self.medians(row)
            if not all(sample.same for sample in samples):
                found.append(f"{row}: another answer than stock's")
            if row in SHARING and cornplug >= stock:
                found.append(f"{row}: {cornplug:.2f} s, and stock takes {stock:.2f} s")
            if row in SHARING and not any(sample.tokens or sample.embeddings for sample in samples):
                found.append(f"{row}: nothing was shared")
            if row != NEW and any(sample.tower_passes for sample in samples):
                found.append(f"{row}: the tower ran again for a known image")
        return found

    def summary(self) -> str:
        """The last line."""
        stock, cornplug = self.total
        return (
            f"These {len(self.samples)} requests take {stock:.1f} s to the first word without cornplug and "
            f"{cornplug:.1f} s with it: {stock - cornplug:.1f} s saved ({(stock - cornplug) / stock:.0%})."
        )

    def as_json(self) -> list[dict[str, Any]]:
        """One object a row."""
        rows = []
        for row in self.samples:
            stock, cornplug = self.medians(row)
            ratio = round(cornplug / stock, 2)
            rows.append(
                {"what": row, "stock_s": round(stock, 2), "cornplug_s": round(cornplug, 2), "ratio": ratio}
            )
        return rows

    def table(self) -> Table:
        """The five rows."""
        caption = f"seconds to the first token, median of {ROUNDS}"
        made = Table(
            title="The same requests without and with cornplug", caption=caption, box=box.SIMPLE_HEAD
        )
        made.add_column("request")
        for column in ("stock", "cornplug", "ratio"):
            made.add_column(column, justify="right", no_wrap=True)
        for row in self.samples:
            stock, cornplug = self.medians(row)
            slower = row in SHARING and cornplug >= stock
            style = "bold red" if slower else "green" if row in SHARING else ""
            made.add_row(row, f"{stock:.2f} s", f"{cornplug:.2f} s", f"{cornplug / stock:.2f}", style=style)
        return made

    def details(self) -> Table:
        """Every request."""
        made = Table(title="Every timed request", box=box.SIMPLE_HEAD)
        made.add_column("request", no_wrap=True)
        for column in ("prompt tokens", "stock", "cornplug", "tower passes", "embeddings", "KV tokens"):
            made.add_column(column, justify="right")
        made.add_column("same answer")
        for row, samples in self.samples.items():
            for one in samples:
                made.add_row(
                    row,
                    str(one.cornplug.prompt_tokens),
                    *(f"{1000 * answer.ttft_s:.0f} ms" for answer in (one.stock, one.cornplug)),
                    *map(str, (one.tower_passes, one.embeddings, one.tokens)),
                    "yes" if one.same else "[bold red]no",
                )
        return made


class Demo:
    """The phases of the demo and its progress bar."""

    def __init__(self, host: Host, console: Console, progress: Progress) -> None:
        self._host, self._console, self._progress = host, console, progress
        self._with_sglang = sglang_python() is not None
        self._bar = progress.add_task("", total=235 if self._with_sglang else 190)
        self._results = Results()
        self._encoder: EncoderProcess
        self._killed: EngineServer | None = None
        """The engine whose store is killed."""
        self._photos = {photo.name: photo.data for photo in photos()}

    def run(self) -> Results:
        """Measure all rows."""
        with self._step("making two models with random weights", 15):
            models = self._host.folder / "models"
            helpdesk = checkpoints.qwen2_vl(models / "helpdesk", **_HELPDESK, **_vision(), llm_seed=1)
            catalogue = checkpoints.qwen2_vl(models / "catalogue", **_CATALOGUE, **_vision(), llm_seed=2)
        stock = self._host.engine("helpdesk-stock", helpdesk)
        self._two_apps(helpdesk, catalogue, stock)
        self._fresh_engines(helpdesk, stock)
        return self._results

    def _two_apps(self, helpdesk: Path, catalogue: Path, stock: EngineServer) -> None:
        """The rows about images. Leaves the stock engine running and the prefixes in the store."""
        host = self._host
        app_a = host.engine("helpdesk", helpdesk, app="helpdesk")
        app_b = host.engine("catalogue", catalogue, app="catalogue")
        stock_b = host.engine("catalogue-stock", catalogue)
        self._encoder = host.encoder((helpdesk, catalogue))
        engines = {"stock A": stock, "A": app_a, "stock B": stock_b, "B": app_b}
        with self._step("starting vllm serve for two apps, stock and with cornplug", 75):
            start({**engines, "encoder": self._encoder})
        with self._step("warming up", 20):
            at_once(*(partial(self._ask_image, engine, ROUNDS) for engine in engines.values()))
            for engine in (stock, app_a):
                self._ask_prefix(engine, ROUNDS, "Is this a rehearsal?")
        for number in self._rounds("a new image, then the same image from a second app", 35):
            self._measure(NEW, number, stock, app_a, self._ask_image)
            self._measure(SECOND, number, stock_b, app_b, self._ask_image)
        for number in self._rounds("a 1,500-token prefix in the first app", 12):
            self._ask_prefix(app_a, number, "What comes first?")
        host.wait_saved()
        for engine in (app_a, app_b, stock_b):
            engine.stop(grace_s=3)

    def _fresh_engines(self, helpdesk: Path, stock: EngineServer) -> None:
        """The rows about prefixes."""
        host = self._host
        fresh = {"A": host.engine("helpdesk-fresh", helpdesk, app="helpdesk")}
        if self._with_sglang:
            fresh["stock"] = host.engine("sglang-stock", helpdesk, sglang=True)
            fresh["SGLang"] = host.engine("sglang", helpdesk, sglang=True, app="helpdesk-sglang")
        what = "vllm serve and two SGLang servers" if self._with_sglang else "vllm serve"
        with self._step(f"starting a fresh {what}", 40 if self._with_sglang else 25):
            start(fresh)
        with self._step("warming up", 15):
            at_once(*(partial(self._ask_prefix, engine, ROUNDS) for engine in (stock, *fresh.values())))
        for number in self._rounds("the prefix again, in the fresh engine", 15):
            self._measure(FRESH, number, stock, fresh["A"], self._ask_prefix)
        if self._with_sglang:
            for number in self._rounds("the prefix again, in SGLang", 18):
                self._measure(SGLANG, number, fresh["stock"], fresh["SGLang"], self._ask_prefix)
        self._killed = fresh["A"]
        for number in self._rounds("a new prompt while the store is killed", 10):
            wait_until(
                lambda: host.store_pid() is not None, deadline_s=60, what="a store after the last kill"
            )
            self._measure(KILL, number, stock, fresh["A"], self._ask_while_killing)

    # -- requests ------------------------------------------------------------------------------

    def _measure(
        self,
        row: str,
        number: int,
        stock: EngineServer,
        cornplug: EngineServer,
        ask: Callable[[EngineServer, int], Answer],
    ) -> None:
        """Ask both engines, in an order that changes with each round."""
        answers = {}
        passes, before = self._encoder.tower_passes(), _received(cornplug)
        for engine in (stock, cornplug)[:: 1 if number % 2 == 0 else -1]:
            time.sleep(_PAUSE_S)
            answers[engine] = ask(engine, number)
        # The counters of a step come out with the next step.
        cornplug.chat("Thank you.", max_tokens=2)
        embeddings, tokens = (now - then for now, then in zip(_received(cornplug), before, strict=True))
        sample = Sample(
            stock=answers[stock],
            cornplug=answers[cornplug],
            embeddings=embeddings,
            tower_passes=self._encoder.tower_passes() - passes,
            tokens=tokens,
        )
        self._results.samples.setdefault(row, []).append(sample)

    def _ask_image(self, engine: EngineServer, number: int) -> Answer:
        image = self._photos[_IMAGES[number]]
        return _ask(engine, "Describe this image for somebody who cannot see it.", images=(image,))

    def _ask_prefix(
        self, engine: EngineServer, number: int, question: str = "And what comes then?"
    ) -> Answer:
        return _ask(engine, f"{rules(number, 44)} {question}")

    def _ask_while_killing(self, engine: EngineServer, number: int) -> Answer:
        """Kill the store just after the engine with cornplug has received the request."""
        pid = self._host.store_pid() if engine is self._killed else None
        timer = threading.Timer(0.05, lambda: pid and os.kill(pid, signal.SIGKILL))
        timer.start()
        try:
            return _ask(engine, f"{rules(10 + number, 8)} Which rule matters most?")
        finally:
            timer.join()

    # -- progress ------------------------------------------------------------------------------

    @contextmanager
    def _step(self, what: str, seconds: float) -> Iterator[None]:
        """Show a step that takes about so many seconds."""
        began = time.monotonic()
        self._progress.update(self._bar, description=what)
        yield
        self._progress.advance(self._bar, seconds)
        self._console.print(f"  {what}: {time.monotonic() - began:.0f} s")

    def _rounds(self, what: str, seconds: float) -> Iterator[int]:
        with self._step(what, 0):
            for number in range(ROUNDS):
                yield number
                self._progress.advance(self._bar, seconds / ROUNDS)


def rules(number: int, count: int) -> str:
    """Rules of one department, about 30 tokens each."""
    lines = (f"Rule {i}: name what you see, and never guess." for i in range(count))
    return f"Department {number} has these rules. {' '.join(lines)}"


def at_once(*calls: Callable[[], Any]) -> None:
    """Make these calls side by side."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def _vision() -> dict[str, Any]:
    return {"vision": _TOWER, "max_pixels": 28 * 28 * 256, "dtype": DTYPE}


def _ask(engine: EngineServer, words: str, images: Sequence[bytes] = ()) -> Answer:
    return engine.chat(words, images=images, max_tokens=_TOKENS, ignore_eos=True, timeout_s=300)


def _received(engine: EngineServer) -> tuple[int, int]:
    """(embeddings, tokens of KV) that an engine has had from elsewhere so far."""
    embeddings = engine.metric("cornplug_hits_total", kind="embedding")
    return int(embeddings), int(engine.metric("cornplug_saved_tokens_total"))


def save(results: Results, machine: Mapping[str, Any]) -> None:
    """Write docs/demo.json, from which script/docs makes the table of two pages."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=_TREE, capture_output=True, text=True
    )
    record = {
        "commit": commit.stdout.strip(),
        "machine": machine,
        "rounds": ROUNDS,
        "rows": results.as_json(),
    }
    _RECORD.write_text(json.dumps(record, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """The machine, before the demo's own load."""
    command = [sys.executable, str(_TREE / "benchmarks" / "machine.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    described: dict[str, Any] = json.loads(done.stdout)
    return described


def main(argv: Sequence[str]) -> int:
    """Run the demo; its exit status."""
    parser = argparse.ArgumentParser(prog="script/demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--details", action="store_true", help="print every request, too")
    parser.add_argument("--keep", action="store_true", help="leave its folder, with the logs, in place")
    parser.add_argument("--save", action="store_true", help="write docs/demo.json, for script/docs")
    options = parser.parse_args(argv)
    # Also where a shell that runs this in the background has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    machine, began = describe_machine() if options.save else None, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Host() as host:
            host.keep = options.keep
            try:
                with Progress(*columns, console=console, transient=True) as progress:
                    results = Demo(host, console, progress).run()
            except _FAILURES as e:
                host.keep = True
                console.print(f"[bold red]the demo could not go on:[/] {type(e).__name__}", soft_wrap=True)
                console.print(str(e), markup=False, soft_wrap=True)
                console.print(f"logs are in {host.folder}", soft_wrap=True)
                return 2
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    if options.details:
        console.print(results.details())
    console.print(results.table())
    if SGLANG not in results.samples:
        console.print("SGLang is not installed here, so its row is left out.")
    faults = results.faults()
    for fault in faults:
        console.print(f"[bold red]{fault}")
    if machine is not None and not faults:
        save(results, machine)
    minutes = (time.monotonic() - began) / 60
    console.print(
        f"[{'bold red' if faults else 'bold green'}]{results.summary()}[/] The demo took {minutes:.1f} min."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
