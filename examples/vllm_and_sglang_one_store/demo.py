"""vLLM and SGLang of one checkpoint, one store, one encoder: the origin of each result.

Each question goes first to a stock engine of each kind, then to `vllm serve --kv-connector
cornplug` and `sglang.launch_server --enable-cornplug`, turn by turn: the second engine
continues the prefix of the first. Exit status: 0 when every answer is stock's, every
image went through a tower once and the second engine took its prefix from the store; 1
when not.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, EngineServer, StoreProcess, VllmServer, photos
from devkit.sglang_engine import SglangServer

MODEL: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 4,
    "vision": {"depth": 8, "embed_dim": 320, "num_heads": 4, "mlp_ratio": 4},
    "max_pixels": 28 * 28 * 256,
}
FLAGS: Final = ("--dtype", "float32")
RULES: Final = " ".join(
    f"Rule {i}: say what can be seen, name the colours, and never guess at a person's name." for i in range(9)
)
TOKENS: Final = 12
TOLERANCE: Final = 1e-4
PAGE: Final = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, and the engine that is asked."""

    engine: str
    words: str
    image: int | None
    second: bool
    """Whether the other engine has prefilled its beginning."""

    def ask(self, server: EngineServer, rules: str = RULES) -> Answer:
        images = [] if self.image is None else [photos()[self.image].data]
        return server.chat(f"{rules} {self.words}", images=images, max_tokens=TOKENS, ignore_eos=True)


TURNS: Final[Sequence[Turn]] = (
    Turn("vLLM", "Describe the image.", 0, False),
    Turn("SGLang", "Who might like it?", 0, True),
    Turn("SGLang", "Describe the image.", 1, False),
    Turn("vLLM", "Who might like it?", 1, True),
    Turn("vLLM", "Now forget images: what is a cache?", None, False),
    Turn("SGLang", "Now forget images: what is a store?", None, True),
)
WARM_UP: Final = (Turn("", "A rehearsal.", 3, False), Turn("", "A rehearsal, without.", None, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The cost and the answer of one turn."""

    turn: Turn
    answer: Answer
    stock: Answer
    passes: int
    from_store: int

    @property
    def same(self) -> bool:
        close = zip(self.answer.logprobs, self.stock.logprobs, strict=True)
        return self.answer.token_ids == self.stock.token_ids and all(
            abs(a - b) <= TOLERANCE for a, b in close
        )

    @property
    def faults(self) -> list[str]:
        shareable = (self.answer.prompt_tokens - 1) // PAGE * PAGE
        first_of_image = self.turn.image is not None and not self.turn.second
        found = [] if self.same else ["another answer than stock's"]
        if self.passes != int(first_of_image):
            found.append(f"{self.passes} tower passes")
        # The last page or two hold the new question, which no engine has seen.
        if self.turn.second and self.from_store < shareable - 2 * PAGE:
            found.append(f"only {self.from_store} of {shareable} tokens from the store")
        return found


class Demo:
    """The processes, in a folder that goes with them."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._console = console

    def run(self) -> bool:
        """Play it, print the table; whether all is as promised."""
        with self._step("making a small Qwen2-VL"):
            model = checkpoints.qwen2_vl(self._folder / "model", **MODEL)
        with ExitStack() as stack:
            engines = self._engines(stack, model, {})
            self._warm_up(engines)
            stock = {turn: turn.ask(engines[turn.engine]) for turn in TURNS}
        with ExitStack() as stack:
            sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-")))
            store = StoreProcess(sockets / "store.sock", size="1GiB", log=self._folder / "store.log")
            encoder = EncoderProcess(
                [model], "--store-socket", str(sockets / "store.sock"),
                socket=sockets / "encoder.sock", log=self._folder / "encoder.log",
            )  # fmt: skip
            with self._step("starting cornplug serve-store and cornplug encoder"):
                stack.enter_context(store)
                stack.enter_context(encoder)
            shared = (
                *("--cornplug-store", str(sockets / "store.sock")),
                *("--cornplug-encoder", str(sockets / "encoder.sock"), "--cornplug-encoder-deadline", "60"),
            )
            engines = self._engines(
                stack, model,
                {"vLLM": ("--kv-connector", "cornplug", "--cornplug-app", "on-vllm", *shared),
                 "SGLang": ("--enable-cornplug", "--cornplug-app", "on-sglang", *shared)},
            )  # fmt: skip
            self._warm_up(engines)
            rows = [self._turn(turn, engines[turn.engine], stock[turn], store, encoder) for turn in TURNS]
        self._console.print(table(rows))
        for row in rows:
            for fault in row.faults:
                self._console.print(
                    f"[bold red]NOT as promised:[/] {row.turn.engine}, {row.turn.words} {fault}"
                )
        good = not any(row.faults for row in rows)
        self._console.print("[bold green]all as promised" if good else "[bold red]failed")
        return good

    def _warm_up(self, engines: Mapping[str, EngineServer]) -> None:
        """Let each kernel run once, on words and an image that no turn has."""
        with self._step("warm-up"):
            for turn in WARM_UP:
                for name, server in engines.items():
                    turn.ask(server, rules=f"{name} rehearses. {RULES}")

    def _engines(
        self, stack: ExitStack, model: Path, flags: Mapping[str, Sequence[str]]
    ) -> dict[str, EngineServer]:
        engines: dict[str, EngineServer] = {}
        for name, kind in (("vLLM", VllmServer), ("SGLang", SglangServer)):
            own = flags.get(name, ())
            with self._step(f"starting {name}{' with cornplug' if own else ', stock'}"):
                log = self._folder / f"{name}-{'cornplug' if own else 'stock'}.log"
                engines[name] = stack.enter_context(kind(model, *FLAGS, *own, log=log))
        return engines

    def _turn(
        self, turn: Turn, server: EngineServer, stock: Answer, store: StoreProcess, encoder: EncoderProcess
    ) -> Row:
        saved, passes = server.metric("cornplug_saved_tokens_total"), encoder.tower_passes()
        answer = turn.ask(server)
        settle(server, store)
        return Row(
            turn=turn,
            answer=answer,
            stock=stock,
            passes=encoder.tower_passes() - passes,
            from_store=int(server.metric("cornplug_saved_tokens_total") - saved),
        )

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self._console.status(what):
            yield
        self._console.print(f"  {what}: {time.monotonic() - began:.0f} s")


def settle(server: EngineServer, store: StoreProcess) -> None:
    """Wait until computed entries are in the store, and counters at /metrics, before the other is asked.

    vLLM's come with its next steps.
    """
    for _ in range(2):
        server.chat("Thank you.", max_tokens=2, ignore_eos=True)
    store.settle()


def table(rows: Sequence[Row]) -> Table:
    """One row a turn."""
    made = Table(title="One store, one encoder, two engines", box=box.SIMPLE_HEAD)
    for column in ("engine", "question", "image", "tower run by"):
        made.add_column(column)
    for column in ("prompt tokens", "KV from the store", "TTFT ms", "stock TTFT ms"):
        made.add_column(column, justify="right")
    made.add_column("same output as stock")
    for row in rows:
        made.add_row(
            row.turn.engine,
            row.turn.words,
            "-" if row.turn.image is None else photos()[row.turn.image].name,
            "service" if row.passes else "none",
            str(row.answer.prompt_tokens),
            str(row.from_store),
            f"{1000 * row.answer.ttft_s:.0f}",
            f"{1000 * row.stock.ttft_s:.0f}",
            "[green]yes" if row.same else "[bold red]no",
        )
    return made


def main() -> int:
    """Run the demo; its exit status."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    # This model is so small that computing is mostly cheaper: the demo shows the sharing.
    os.environ["CORNPLUG_STORE_LOAD_WHEN"] = "always"
    with tempfile.TemporaryDirectory(prefix="cornplug-two-engines-") as folder:
        return 0 if Demo(Path(folder), console).run() else 1


if __name__ == "__main__":
    sys.exit(main())
