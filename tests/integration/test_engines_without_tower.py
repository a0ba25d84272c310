"""Real engines that load no vision tower: the encoder service takes their images, dies and comes back."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from devkit import checkpoints
from devkit.engines import Answer, RequestFailed, StoreProcess, VllmServer, data_url, photos
from devkit.processes import EncoderProcess, wait_until

pytestmark = pytest.mark.timeout(2400)

MAKERS = {"llava": checkpoints.llava, "qwen2_vl": checkpoints.qwen2_vl}
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Question:
    """A greedy request."""

    words: str
    images: tuple[int, ...] = ()

    def ask(self, server: VllmServer, **fields: Any) -> Answer:
        images = [photos()[i].data for i in self.images]
        return server.chat(self.words, images=images, max_tokens=8, **fields)


TEXT = Question("no image here")
FIRST = Question("what is this", (0,))
QUESTIONS = (FIRST, Question("compare", (2, 1)), FIRST)
LATER = Question("what is this", (3,))


@dataclass
class Rig:
    """An engine without a tower, its service, and the answers of a stock engine."""

    model: Path
    engine: VllmServer
    service: EncoderProcess
    stock: dict[Question, Answer]

    def post(self, photo: int) -> httpx.Response:
        content = [{"type": "image_url", "image_url": {"url": data_url(photos()[photo].data)}}]
        body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return httpx.post(f"{self.engine.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)

    def same(self, question: Question, **fields: Any) -> None:
        want, got = self.stock[question], question.ask(self.engine, **fields)
        assert (got.token_ids, got.prompt_tokens) == (want.token_ids, want.prompt_tokens)
        assert got.logprobs == pytest.approx(want.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.fixture(params=sorted(MAKERS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    model = MAKERS[request.param](tmp_path / "model")
    with VllmServer(model, log=tmp_path / "stock.log") as stock:
        answers = {question: question.ask(stock) for question in {*QUESTIONS, TEXT, LATER}}
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    env = {"CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret"), "CORNPLUG_STORE_AUTOSTART": "false"}
    store = StoreProcess(sockets / "s.sock", log=tmp_path / "store.log", env=env)
    service = EncoderProcess(
        [model],
        *("--store-socket", str(sockets / "s.sock")),
        socket=sockets / "e.sock",
        log=tmp_path / "encoder.log",
        env=env,
    )
    engine = VllmServer(
        model,
        *("--kv-connector", "cornplug", "--cornplug-store", str(sockets / "s.sock")),
        *("--cornplug-tower", "service", "--cornplug-encoder", service.url),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        log=tmp_path / "engine.log",
        env=env,
    )
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, sockets, ignore_errors=True)
        for process in (store, service, engine):
            ends.callback(process.kill)
            process.start()
        yield Rig(model, engine, service, answers)


def tower_bytes(model: Path) -> int:
    """Bytes of the checkpoint's tower and projector."""
    with safe_open(model / "model.safetensors", "pt") as file:
        names = [n for n in file.keys() if re.search(r"vision_tower|visual|multi_modal_projector", n)]  # noqa: SIM118
        return sum(file.get_tensor(name).nbytes for name in names)


@pytest.mark.support("Sharing", "an engine without a vision tower (`--cornplug-tower service`)")
def test_engine_without_tower_answers_as_with_it_and_outlives_its_service(rig: Rig) -> None:
    log = rig.engine.log.read_text()
    told = re.search(
        r"did not load .* \((\d+) bytes\)\. This is as much memory as KV of (\d+) tokens, at (\d+) bytes", log
    )
    assert told is not None
    size, tokens, each = map(int, told.groups())
    # vLLM builds no layer behind the one whose features LLaVA reads.
    assert 0.7 * tower_bytes(rig.model) < size <= tower_bytes(rig.model)
    assert tokens == size // each > 0
    for question in QUESTIONS:
        rig.same(question)
    assert rig.service.tower_passes() == 3
    rig.same(FIRST, cache_salt="acme")
    with pytest.raises(RequestFailed, match="At most 2 image"):
        Question("three", (0, 1, 2)).ask(rig.engine)
    with pytest.raises(RequestFailed) as broken:
        rig.engine.chat("what is this", images=[b"\x89PNG no image"], max_tokens=4)
    assert broken.value.status == 400
    rig.service.kill()
    answer = rig.post(3)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert rig.service.url in answer.text
    rig.same(TEXT)
    rig.service.start()
    wait_until(lambda: rig.post(3).status_code == 200, deadline_s=60, what="the service's return")
    rig.same(LATER)
