"""Engines with every setting that can be set at once and that cornplug calls harmless: they still share.

A plain engine fills the store with the KV of prompts and the rows of an image. Engines with the settings of
tests/harmless_settings take both and answer alike. Unit tests beside the engines' field tables say for every
other harmless setting why it is not among them.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from harmless_settings import Run, sglang, vllm
from integration.stack import PREAMBLE, count, settle_saves
from PIL import Image

from devkit import checkpoints
from devkit.engines import Answer, EngineServer, StoreProcess, VllmServer
from devkit.family_trials import trial_environment
from devkit.processes import together
from devkit.sglang_engine import SglangServer, sglang_python
from devkit.vllm_beds import next_vllm

pytestmark = pytest.mark.timeout(1800)

PAGE: Final = 64
WORDS: Final = (f"{PREAMBLE} What is a cache?", f"{PREAMBLE} What is shown?", "What is it?")
"""The first is asked without the image. The last is shorter than a page with it: its rows are needed."""


def picture() -> bytes:
    image = Image.new("RGB", (112, 112), (255, 0, 0))
    image.paste((0, 0, 255), (56, 0, 112, 112))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def ask(server: EngineServer, index: int) -> Answer:
    return server.chat(WORDS[index], images=[picture()] if index else [], max_tokens=8)


@dataclass(frozen=True)
class Place:
    """What the engines of one test have in common."""

    folder: Path
    model: Path
    given: Path
    """The folder that the runs' settings name."""
    store: StoreProcess

    def flags(self) -> tuple[str, ...]:
        return ("--cornplug-store", str(self.store.socket), "--cornplug-save", "always")

    def environment(self) -> dict[str, str]:
        # What is tested is settings, in each release: not whether the family was compared in it.
        trial = trial_environment(self.folder, {"qwen2_vl"})
        return {"CORNPLUG_STORE_AUTOSTART": "false", "VLLM_SERVER_DEV_MODE": "1", **trial}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    model, given = checkpoints.qwen2_vl(tmp_path / "model"), tmp_path / "given"
    checkpoints.qwen2_vl(given / "tokenizer")
    with StoreProcess(sockets / "s", size="256MiB", log=tmp_path / "store.log") as store:
        yield Place(tmp_path, model, given, store)
    shutil.rmtree(sockets, ignore_errors=True)


def fill(first: EngineServer, store: StoreProcess) -> list[Answer]:
    """Have the plain engine answer and save. Returns its answers."""
    answers = [ask(first, i) for i in range(len(WORDS))]
    settle_saves(first, store)
    assert store.stat().entries > 0, account(first)
    assert [answer.prompt_tokens > 3 * PAGE for answer in answers] == [True, True, False]
    assert answers[-1].prompt_tokens < PAGE
    return answers


def takes_all_from_the_store(server: EngineServer, expected: list[Answer]) -> None:
    """Fails, with counters and cornplug's log lines, unless the server shares and answers as expected."""
    taken = (ask(server, i) for i in range(len(WORDS)))
    for i, (answer, known) in enumerate(zip(taken, expected, strict=True)):
        assert answer.token_ids == known.token_ids, f"prompt {i}\n{account(server)}"
        assert answer.logprobs == pytest.approx(known.logprobs, abs=1e-4), f"prompt {i}\n{account(server)}"
    shareable = sum((answer.prompt_tokens - 1) // PAGE * PAGE for answer in expected)
    assert count(server, "saved_tokens_total") >= 0.5 * shareable, account(server)
    assert count(server, "hits_total", kind="kv_page") >= 4, account(server)
    assert count(server, "hits_total", kind="embedding") >= 1, account(server)


def account(server: EngineServer) -> str:
    """Hits and misses by their reason, and what cornplug logged."""
    counters = (
        f"{name} {value:g}"
        for name, value in sorted(server.metrics().items())
        if name.startswith("cornplug_") and "_total" in name and value
    )
    lines = server.log.read_text(errors="replace").splitlines()
    return "\n".join([server.log.name, *counters, *[line for line in lines if "cornplug" in line][-60:]])


@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_vllm_with_harmless_settings_takes_pages_and_rows(release: str, place: Place) -> None:
    command = next_vllm() if release == "0.33" else None

    def engine(name: str, run: Run) -> VllmServer:
        return VllmServer(
            place.model,
            *("--kv-connector", "cornplug", *place.flags(), *run.arguments(place.given)),
            log=place.folder / f"{name}.log",
            env={**place.environment(), **run.environment(place.given)},
            vllm=command,
        )

    with together(first := engine("first", Run(flags=vllm.PLAIN))):
        expected = fill(first, place.store)
    servers = {name: engine(name, run) for name, run in vllm.runs(release).items()}
    with together(*servers.values()):
        for server in servers.values():
            takes_all_from_the_store(server, expected)


@pytest.mark.sglang_alone
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
def test_sglang_with_harmless_settings_takes_pages_and_rows(place: Place) -> None:
    def engine(name: str, flags: list[str], variables: Mapping[str, str]) -> SglangServer:
        env = {**place.environment(), **variables}
        return SglangServer(place.model, *place.flags(), *flags, log=place.folder / f"{name}.log", env=env)

    with together(first := engine("first", [], {})):
        expected = fill(first, place.store)
    run = sglang.SERVER
    server = engine("server", run.arguments(place.given), run.environment(place.given))
    with together(server):
        takes_all_from_the_store(server, expected)
