"""Which models share a tower's work, on real engines: the weights decide, never a name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from integration.stack import PREAMBLE, Ask, Stack, count
from safetensors.torch import load_file, save_file

from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.host import free_port
from devkit import checkpoints
from devkit.checkpoints import qwen
from devkit.engines import Answer, EncoderProcess, VllmServer, photos
from devkit.quantised import quantised

SHARED = Ask(f"{PREAMBLE} What is shown?", (0,))
SALT = "fine-tunes"


def one_value_changed(source: Path, path: Path, tensor: str) -> Path:
    """A copy whose tower differs in one number."""
    shutil.copytree(source, path)
    weights = load_file(source / "model.safetensors")
    changed = weights[tensor].clone()
    changed.view(-1)[0] += torch.tensor(0.25)
    save_file({**weights, tensor: changed}, path / "model.safetensors", {"format": "pt"})
    return path


@dataclass(frozen=True)
class Kin:
    """A base model and its relatives."""

    base: Callable[[Path], Path]
    wider: Callable[[Path], Path]
    """Another LLM, of another width, over the same tower."""
    tuned: Callable[[Path], Path]
    """Tower and projector untouched, every weight of the LLM another one."""
    tower_tensor: str


FAMILIES = {
    "llava": Kin(
        base=lambda path: checkpoints.llava(path, llm_seed=1),
        wider=lambda path: checkpoints.llava(path, llm_seed=2, hidden_size=128),
        tuned=lambda path: checkpoints.llava(path, llm_seed=3, projector_seed=1),
        tower_tensor="vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias",
    ),
    "qwen2_vl": Kin(
        base=lambda path: qwen.qwen2_vl(path, llm_seed=1),
        wider=lambda path: qwen.qwen2_vl(path, llm_seed=2, hidden_size=128),
        tuned=lambda path: qwen.qwen2_vl(path, llm_seed=3, projector_seed=1),
        tower_tensor="visual.blocks.0.mlp.fc1.bias",
    ),
}


@dataclass
class Scene:
    """A service that was told of the base and the wider model, and of neither fine-tune."""

    kin: Kin
    base: Path
    wider: Path
    folder: Path
    stack: Stack
    encoder: EncoderProcess

    @contextmanager
    def engine(self, name: str, model: Path) -> Iterator[VllmServer]:
        """A vLLM that shares embeddings. Its KV is another LLM's than anybody else's here."""
        self.stack.models = {name: model}
        server = self.stack.serve(name, name)
        try:
            yield server
        finally:
            server.stop()

    def own(self, server: VllmServer) -> Answer:
        """What the engine answers out of its own tower: the service is stopped meanwhile."""
        self.encoder.freeze()
        try:
            return SHARED.put(server, salt="alone")
        finally:
            self.encoder.cont()


@pytest.fixture(
    scope="module",
    # The same four engines again: a matrix, which is script/test-more's.
    params=["llava", pytest.param("qwen2_vl", marks=pytest.mark.stress)],
)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    kin = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(f"kin-{request.param}")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    base, wider = kin.base(folder / "base"), kin.wider(folder / "wider")
    encoder = EncoderProcess(
        [base, wider],
        *("--store-socket", str(sockets / "store.sock")),
        socket=sockets / "encoder.sock",
        port=free_port(),
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    stack = Stack(folder, {}, {}, sockets / "store.sock", encoder)
    store = stack.start_store()
    try:
        with encoder, EncoderClient(encoder.url) as client:
            client.encode(photos()[0].data, model=str(base), cache_salt=SALT)
            assert encoder.tower_passes() == 1
            yield Scene(kin, base, wider, folder, stack, encoder)
    finally:
        store.stop()
    shutil.rmtree(sockets, ignore_errors=True)


def same(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_an_llm_of_another_width_shares_the_frozen_tower(scene: Scene) -> None:
    # Features are keyed by the tower's input to the last bit, and vLLM normalises Qwen's images in its
    # own way: so both are asked of engines.
    with scene.engine("base", scene.base) as server:
        SHARED.put(server, salt="widths")
        assert count(server, "hits_total", what="embedding", source="service_computed") == 1
    passes = scene.encoder.tower_passes()
    with scene.engine("wider", scene.wider) as server:
        answer = SHARED.put(server, salt="widths")
        assert scene.encoder.tower_passes() == passes
        assert count(server, "hits_total", what="embedding", source="service_cached") == 1
        same(answer, scene.own(server))


def test_a_fine_tune_with_a_quantised_llm_shares_the_base_s_embeddings(scene: Scene) -> None:
    """Another name, another revision, other and quantised LLM weights: and never heard of by the service."""
    tuned = scene.kin.tuned(scene.folder / "tuned")
    model = quantised(tuned, scene.folder / "somebody--else-w8a8-v2")
    passes = scene.encoder.tower_passes()
    with scene.engine("tuned", model) as server:
        answer = SHARED.put(server, salt=SALT)
        assert scene.encoder.tower_passes() == passes
        assert count(server, "hits_total", what="embedding", source="store") == 1
        assert count(server, "saved_tower_passes_total") == 1
        same(answer, scene.own(server))


def test_a_tower_that_differs_in_one_value_shares_nothing(scene: Scene) -> None:
    model = one_value_changed(scene.base, scene.folder / "touched", scene.kin.tower_tensor)
    passes = scene.encoder.tower_passes()
    with scene.engine("touched", model) as server:
        answer = SHARED.put(server, salt=SALT)
        assert scene.encoder.tower_passes() == passes
        assert count(server, "hits_total", what="embedding") == 0
        assert count(server, "misses_total", what="embedding") == 1
        same(answer, scene.own(server))
