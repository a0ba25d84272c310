"""One engine with a vision tower and one without: same requests, same answers, and a service that dies.

Exit status: 0 when every answer is stock's, requests with images get 503 and a Retry-After while the service
is gone, requests without get answers, and the engine is back with the service; 1 when not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.table import Table

from devkit import checkpoints
from devkit.engines import EncoderProcess, StoreProcess, VllmServer, data_url, photos
from devkit.processes import at_once, wait_until

TOKENS: Final = 12
IMAGE: Final = 0
LATER: Final = 1


def ask(server: VllmServer, words: str, image: int | None) -> httpx.Response:
    """The answer to one greedy request, whatever its status."""
    content = [{"type": "text", "text": words}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(photos()[image].data)}})  # type: ignore[dict-item]
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300, trust_env=False)


def tokens(answer: httpx.Response) -> list[int]:
    """The ids of an answer's tokens; none of an error."""
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []


class Demo:
    """The requests in their order, and a table of their answers."""

    def __init__(self, stock: VllmServer, engine: VllmServer, service: EncoderProcess) -> None:
        self._stock, self._engine, self._service = stock, engine, service
        self.table = Table("service", "request", "status", "Retry-After", "tokens are stock's")
        self.kept = True

    def run(self) -> None:
        """All requests, with the service, without it and with it again."""
        self._same("up", "What is shown?", IMAGE)
        self._same("up", "Say hello.", None)
        self._service.kill()
        gone = ask(self._engine, "What is shown?", LATER)
        retry = gone.headers.get("retry-after", "")
        self._row("killed", "image", gone, retry, "", gone.status_code == 503 and retry != "")
        self._same("killed", "Say good morning.", None)
        self._service.start()
        back: Callable[[], bool] = lambda: ask(self._engine, "Look.", LATER).status_code == 200  # noqa: E731
        wait_until(back, deadline_s=60, what="the return of the service")
        self._same("up again", "What is shown?", LATER)

    def _same(self, service: str, words: str, image: int | None) -> None:
        want, got = tokens(ask(self._stock, words, image)), ask(self._engine, words, image)
        same = bool(want) and tokens(got) == want
        self._row(service, "text" if image is None else "image", got, "", "yes" if same else "no", same)

    def _row(self, service: str, what: str, got: httpx.Response, retry: str, same: str, kept: bool) -> None:
        self.kept = self.kept and kept
        self.table.add_row(service, what, str(got.status_code), retry, same)


def main() -> int:
    """Run the demo; 0 if everything was as promised."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="cornplug-demo-") as name, ExitStack() as ends:
        folder = Path(name)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_bytes(os.urandom(32))
        env = {"CORNPLUG_STORE_SECRET_FILE": str(folder / "secret"), "CORNPLUG_STORE_AUTOSTART": "false"}
        model, socket = checkpoints.qwen2_vl(folder / "model"), str(folder / "s.sock")
        store = StoreProcess(folder / "s.sock", log=folder / "store.log", env=env)
        service = EncoderProcess(
            [model], "--store-socket", socket, socket=folder / "e.sock", log=folder / "encoder.log", env=env
        )
        stock = VllmServer(model, log=folder / "stock.log")
        flags = ("--cornplug-tower", "service", "--cornplug-encoder", service.url, "--cornplug-store", socket)
        engine = VllmServer(model, "--kv-connector", "cornplug", *flags, log=folder / "engine.log", env=env)
        for process in (store, service, stock, engine):
            ends.callback(process.kill)
        console.print("starting a store, the service, and two engines, one without a tower")
        store.start()
        service.start()
        at_once(stock.start, engine.start)
        lines = (folder / "engine.log").read_text().splitlines()
        console.print(*(line[line.index("rank") :] for line in lines if "did not load" in line), sep="\n")
        demo = Demo(stock, engine, service)
        demo.run()
        console.print(demo.table)
        return 0 if demo.kept else 1


if __name__ == "__main__":
    sys.exit(main())
