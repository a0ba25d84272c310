"""Each family's embeddings, on real engines: what the encoder service makes is what the engine's own
tower makes.

One service knows all models. An engine is asked about two images, one of them wide: it takes both
embeddings from the service, then those that a client had made, and, under another salt and with the service
stopped, it encodes them.
`VALIDATED_FAMILIES` in each room's `compat.py` is the list of the lines here.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from integration.stack import Stack, count
from PIL import Image

from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.host import free_port
from cornplug.sglang_hooks import compat as sglang_room
from cornplug.vllm_connector import compat as vllm_room
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, EngineServer
from devkit.sglang_engine import sglang_python

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

VLLM: Mapping[str, Callable[[Path], Path]] = {
    "llava": checkpoints.llava,
    "llava_next": checkpoints.llava_next,
    "llava_onevision": checkpoints.llava_onevision,
    "gemma3": checkpoints.gemma3,
    "internvl": checkpoints.internvl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen3_vl": checkpoints.qwen3_vl,
    "qwen3_vl_moe": checkpoints.qwen3_vl_moe,
}
SGLANG = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ELSEWHERE = {
    "vllm": ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "sglang": ("qwen2_vl", "qwen3_vl"),
}
"""What other tests of script/test show as well (sharing, fine-tunes, two engines, vLLM's model classes in
process; Qwen3-VL's tower is its mixture's): these lines wait for somebody to ask for stress tests. An
engine's start costs half a minute."""
needs_sglang = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
SIZES = ((90, 80), (240, 100))
TAKES, COMPUTES, OTHERS = "takes", "computes", "others"
"""Salts: what is named under one is not known under the other."""


def lines(engine: str, families: Iterable[str]) -> list[object]:
    """The lines of an engine, some of them marked."""
    return [
        pytest.param(name, marks=pytest.mark.stress if name in ELSEWHERE[engine] else ()) for name in families
    ]


def picture(seed: int, size: tuple[int, int]) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize(size).save(out, "PNG")
    return out.getvalue()


PICTURES = [picture(seed, size) for seed, size in enumerate(SIZES)]


@dataclass
class Scene:
    stack: Stack
    encoder: EncoderProcess


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, sockets = tmp_path_factory.mktemp("families"), Path(tempfile.mkdtemp(prefix="cp-"))
    models = {name: make(folder / name) for name, make in VLLM.items()}
    encoder = EncoderProcess(
        list(models.values()),
        *("--store-socket", str(sockets / "store.sock")),
        socket=sockets / "encoder.sock",
        port=free_port(),
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    stack = Stack(folder, models, {}, sockets / "store.sock", encoder)
    store = stack.start_store()
    try:
        with encoder:
            yield Scene(stack, encoder)
    finally:
        store.stop()
    shutil.rmtree(sockets, ignore_errors=True)


def ask(server: EngineServer, salt: str) -> list[Answer]:
    return [
        server.chat("What is shown?", images=[data], max_tokens=6, cache_salt=salt, top_logprobs=5)
        for data in PICTURES
    ]


def same(some: Sequence[Answer], others: Sequence[Answer]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for row, column in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert row == pytest.approx(column, abs=1e-4)


def counters(server: EngineServer) -> dict[str, float]:
    """What a failure is explained by: hits, and misses by their reason."""
    return {k: v for k, v in server.metrics().items() if k.startswith("cornplug_") and "_total" in k and v}


def serves_as_it_computes(server: EngineServer, encoder: EncoderProcess, model: str) -> None:
    # SGLang warms up with an image of its own.
    before = count(server, "hits_total", what="embedding")
    taken = ask(server, TAKES + server.log.stem)
    ran = count(server, "hits_total", what="embedding", source="service_computed")
    assert ran == before + len(PICTURES), counters(server)
    # Somebody else's, by the content of model and image alone.
    with EncoderClient(encoder.url) as client:
        for data in PICTURES:
            client.encode(data, model=model, cache_salt=OTHERS)
    same(ask(server, OTHERS), taken)
    assert count(server, "hits_total", what="embedding", source="store") == len(PICTURES)
    assert count(server, "misses_total", what="embedding") == 0
    encoder.freeze()
    try:
        computed = ask(server, COMPUTES + server.log.stem)
    finally:
        encoder.cont()
    assert count(server, "misses_total", what="embedding") == len(PICTURES)
    same(taken, computed)
    # Else the comparison would say nothing: the model looks at its images.
    first, second = (answer.top_logprobs[0] for answer in computed)
    assert first != pytest.approx(second, abs=1e-3)


@pytest.mark.parametrize("family", lines("vllm", VLLM))
def test_vllm(scene: Scene, family: str) -> None:
    server = scene.stack.serve(f"vllm-{family}", family)
    try:
        serves_as_it_computes(server, scene.encoder, str(scene.stack.models[family]))
    finally:
        server.stop()


@needs_sglang
@pytest.mark.parametrize("family", lines("sglang", SGLANG))
def test_sglang(scene: Scene, family: str) -> None:
    server = scene.stack.serve_sglang(f"sglang-{family}", family)
    try:
        serves_as_it_computes(server, scene.encoder, str(scene.stack.models[family]))
    finally:
        server.stop()


@needs_sglang
@pytest.mark.parametrize("family", ["gemma3"])
def test_what_was_not_compared_runs_as_stock(scene: Scene, family: str) -> None:
    passes = scene.encoder.tower_passes()
    server = scene.stack.serve_sglang(f"stock-{family}", family)
    try:
        ask(server, TAKES)
        assert count(server, "hits_total", what="embedding") == 0
        assert count(server, "misses_total", what="embedding") == 0
        assert count(server, "saves_total", what="embedding") == 0
    finally:
        server.stop()
    assert scene.encoder.tower_passes() == passes
    said = [line for line in server.log.read_text().splitlines() if f"sglang makes of '{family}'" in line]
    assert len(said) == 1


def test_each_room_shares_what_is_compared_here() -> None:
    assert set(VLLM) == vllm_room.VALIDATED_FAMILIES
    assert set(SGLANG) == sglang_room.VALIDATED_FAMILIES
