"""Each family's embeddings, on real engines: the encoder service's equal those of the engine's own tower.

One service knows all models. An engine is asked about two images, one of them wide: it takes both
embeddings from the service, then those that a client had made, and, under another salt and with the service
stopped, it encodes them.

In bfloat16 and float16 an answer says little of a row, so the rows themselves are compared. Those that the
engine stores must be as near to the float32 service's as the rows of a service of the engine's dtype are.

The families that a release of an engine shares in a dtype are the lines that passed here: script/docs writes
`cornplug/checkpoints/tested_releases.py` from the results that a run keeps. Here each line is shared on
trial (`devkit/family_trials.py`).
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from integration.stack import Pairs, Stack, count, same_answers, selected, settle_saves
from PIL import Image

from cornplug.checkpoints.tested_releases import VALIDATED
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.host import free_port
from devkit import checkpoints
from devkit.engines import Answer, EncoderProcess, EngineServer
from devkit.family_trials import trial_environment
from devkit.sglang_engine import sglang_python
from devkit.vllm_beds import next_vllm

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
SGLANG = ("glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MODELS = {**VLLM, "glm4v": checkpoints.glm4v}
FLOAT16 = ("llava", "llava_next", "llava_onevision")
"""Families whose checkpoints are published in float16; those of the others are in bfloat16."""
needs_sglang = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed: script/setup")
SIZES = ((90, 80), (240, 100))
TAKES, COMPUTES, OTHERS = "takes", "computes", "others"
"""Salts: an entry named under one is not known under another."""


def lines(engine: str, families: Iterable[str], dtype: str = "float32") -> list[object]:
    """The lines of "vllm", "next" or "sglang": "ENGINE-FAMILY", and "-DTYPE" unless it is float32."""
    found = []
    for family in families:
        name = f"{engine}-{family}" + (f"-{dtype}" if dtype != "float32" else "")
        of = "sglang" if engine == "sglang" else "vllm"
        mark = pytest.mark.support("Families: embeddings equal the engine's", family, engine=of)
        found.append(pytest.param(name, marks=mark))
    return found


def image(seed: int, size: tuple[int, int]) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize(size).save(out, "PNG")
    return out.getvalue()


IMAGES = [image(seed, size) for seed, size in enumerate(SIZES)]


@dataclass
class Scene:
    stack: Stack
    encoder: EncoderProcess
    engines: Pairs

    def model(self, line: str) -> str:
        """The folder of a line's model, by which the service knows it."""
        return str(self.stack.models[line.split("-")[1]])

    @contextmanager
    def service_in(self, dtype: str, model: str) -> Iterator[EncoderProcess]:
        """A second service of the same store that computes one model in another dtype."""
        socket = self.stack.store_socket.with_name(f"{dtype}.sock")
        with EncoderProcess(
            [model],
            *("--store-socket", str(self.stack.store_socket)),
            socket=socket,
            dtype=dtype,
            log=self.stack.folder / f"encoder-{dtype}.log",
            env={"CORNPLUG_STORE_AUTOSTART": "false"},
        ) as service:
            yield service


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, sockets = tmp_path_factory.mktemp("families"), Path(tempfile.mkdtemp(prefix="cp-"))
    models = {name: make(folder / name) for name, make in MODELS.items()}
    encoder = EncoderProcess(
        list(models.values()),
        *("--store-socket", str(sockets / "store.sock")),
        socket=sockets / "encoder.sock",
        port=free_port(),
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    stack = Stack(folder, models, {}, sockets / "store.sock", encoder)

    def engine(line: str) -> EngineServer:
        room, family, *halves = line.split("-")
        flags = [word for dtype in halves for word in ("--dtype", dtype)]
        if room == "sglang":
            return stack.sglang(
                line, family, *flags, env=trial_environment(folder, {family}.intersection(SGLANG))
            )
        command = next_vllm() if room == "next" else None
        return stack.vllm(line, family, *flags, env=trial_environment(folder, {family}), command=command)

    lines = selected(request, "line")
    engines = Pairs(
        engine, [line for line in lines if not line.startswith("sglang") or sglang_python() is not None]
    )
    store = stack.start_store()
    try:
        with encoder, closing(engines):
            yield Scene(stack, encoder, engines)
    finally:
        store.stop()
    shutil.rmtree(sockets, ignore_errors=True)


def ask(server: EngineServer, salt: str) -> list[Answer]:
    return [
        server.chat("What is shown?", images=[data], max_tokens=6, cache_salt=salt, top_logprobs=5)
        for data in IMAGES
    ]


def counters(server: EngineServer) -> dict[str, float]:
    """Hits, and misses by their reason: they explain a failure."""
    return {k: v for k, v in server.metrics().items() if k.startswith("cornplug_") and "_total" in k and v}


def serves_as_it_computes(server: EngineServer, encoder: EncoderProcess, model: str) -> None:
    # SGLang warms up with another image.
    before = count(server, "hits_total", kind="embedding")
    missed = count(server, "misses_total", kind="embedding")
    taken = ask(server, TAKES + server.log.stem)
    ran = count(server, "hits_total", kind="embedding", source="service_computed")
    assert ran == before + len(IMAGES), counters(server)
    # Made for a client: found by the content of model and image alone.
    with EncoderClient(encoder.url) as client:
        for data in IMAGES:
            client.encode(data, model=model, cache_salt=OTHERS)
    same_answers(ask(server, OTHERS), taken)
    assert count(server, "hits_total", kind="embedding", source="store") == len(IMAGES)
    assert count(server, "misses_total", kind="embedding") == missed
    encoder.freeze()
    try:
        computed = ask(server, COMPUTES + server.log.stem)
    finally:
        encoder.resume()
    assert count(server, "misses_total", kind="embedding") == missed + len(IMAGES)
    same_answers(taken, computed)
    # Else the comparison would say nothing: the model looks at its images.
    first, second = (answer.top_logprobs[0] for answer in computed)
    assert first != pytest.approx(second, abs=1e-3)


@pytest.mark.parametrize("line", lines("vllm", VLLM) + lines("next", VLLM))
def test_vllm_family_served_embeddings_equal_own_tower(scene: Scene, line: str) -> None:
    serves_as_it_computes(scene.engines.get(line), scene.encoder, scene.model(line))


@needs_sglang
@pytest.mark.parametrize("line", lines("sglang", SGLANG))
def test_sglang_family_served_embeddings_equal_own_tower(scene: Scene, line: str) -> None:
    serves_as_it_computes(scene.engines.get(line), scene.encoder, scene.model(line))


def stores_rows_of_its_dtype(scene: Scene, line: str) -> None:
    server, model, dtype = scene.engines.get(line), scene.model(line), line.split("-")[2]
    salt = TAKES + server.log.stem
    ask(server, salt)
    assert scene.stack.store is not None
    settle_saves(server, scene.stack.store)
    with (
        scene.service_in(dtype, model) as service,
        EncoderClient(service.url) as half,
        EncoderClient(scene.encoder.url) as whole,
    ):
        for data in IMAGES:
            stored = half.encode(data, model=model, cache_salt=salt)
            computed = half.encode(data, model=model, cache_salt=OTHERS + server.log.stem)
            assert (stored.dtype, computed.dtype) == (dtype, dtype)
            assert stored.origin != "computed", counters(server)
            assert computed.origin == "computed"
            exact = whole.encode(data, model=model).numpy()
            bound = 2 * spread(computed.numpy(), exact)
            assert spread(stored.numpy(), exact) <= bound
            # Else the comparison would say nothing: rows in another order are further away.
            assert spread(exact[::-1], exact) > 2 * bound


def spread(some: npt.NDArray[np.generic], others: npt.NDArray[np.generic]) -> float:
    """Root mean square of the differences."""
    assert some.shape == others.shape
    return float(np.sqrt(np.mean((some.astype(np.float64) - others.astype(np.float64)) ** 2)))


def halves_of_vllm() -> list[object]:
    return [
        line
        for engine in ("vllm", "next")
        for dtype, families in (("bfloat16", VLLM), ("float16", FLOAT16))
        for line in lines(engine, families, dtype)
    ]


@pytest.mark.parametrize("line", halves_of_vllm())
def test_vllm_family_rows_in_half_precision_are_as_the_services(scene: Scene, line: str) -> None:
    stores_rows_of_its_dtype(scene, line)


@needs_sglang
@pytest.mark.parametrize("line", lines("sglang", SGLANG, "bfloat16"))
def test_sglang_family_rows_in_half_precision_are_as_the_services(scene: Scene, line: str) -> None:
    stores_rows_of_its_dtype(scene, line)


@needs_sglang
@pytest.mark.parametrize("line", ["sglang-gemma3"])
def test_sglang_family_not_compared_asks_no_service(scene: Scene, line: str) -> None:
    """Its servers may share with one another (`test_own_towers.py`)."""
    server = scene.engines.get(line)
    passes = scene.encoder.tower_passes()
    ask(server, TAKES)
    assert count(server, "hits_total", kind="embedding") == 0
    assert scene.encoder.tower_passes() == passes
    family = line.partition("-")[2]
    lines = server.log.read_text().splitlines()
    assert sum(f"sglang's embeddings of '{family}'" in text for text in lines) == 1


def test_validated_families_have_a_line_in_this_file() -> None:
    here = {"vllm": set(VLLM), "sglang": set(SGLANG)}
    assert all(family in here[engine] for engine, _, _, kind, family in VALIDATED if kind == "image")
