"""Models that share a tower's work, on real engines: the weights decide, never a name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from integration.stack import PREAMBLE, Ask, Pairs, Stack, count
from safetensors.torch import load_file, save_file

from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.host import free_port
from devkit import checkpoints
from devkit.checkpoints import qwen
from devkit.engines import Answer, EncoderProcess, EngineServer, photos
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
    """A service that knows the base and the wider model, and neither fine-tune."""

    encoder: EncoderProcess
    engines: Pairs
    """vLLMs that share embeddings: base, wider, tuned, touched. No two that have one language model are asked
    under one salt: no page is shared."""

    def own(self, server: EngineServer) -> Answer:
        """The engine's answer from its own tower: the service is stopped meanwhile."""
        self.encoder.freeze()
        try:
            return SHARED.put(server, salt="alone")
        finally:
            self.encoder.resume()


@pytest.fixture(
    scope="module",
    # The same four engines again: a matrix, which is script/test-more's.
    params=["llava", "qwen2_vl"],
)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    kin = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(f"kin-{request.param}")
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    base, wider = kin.base(folder / "base"), kin.wider(folder / "wider")
    models = {
        "base": base,
        "wider": wider,
        "tuned": quantised(kin.tuned(folder / "tuned"), folder / "another--name-w8a8-v2"),
        "touched": one_value_changed(base, folder / "touched", kin.tower_tensor),
    }
    encoder = EncoderProcess(
        [base, wider],
        *("--store-socket", str(sockets / "store.sock")),
        socket=sockets / "encoder.sock",
        port=free_port(),
        log=folder / "encoder.log",
        env={"CORNPLUG_STORE_AUTOSTART": "false"},
    )
    stack = Stack(folder, models, {}, sockets / "store.sock", encoder)
    engines = Pairs(lambda name: stack.vllm(name, name), list(models))
    store = stack.start_store()
    try:
        with encoder, closing(engines), EncoderClient(encoder.url) as client:
            client.encode(photos()[0].data, model=str(base), cache_salt=SALT)
            assert encoder.tower_passes() == 1
            yield Scene(encoder, engines)
    finally:
        store.stop()
    shutil.rmtree(sockets, ignore_errors=True)


def same(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.support("Sharing", "features for a language model of another width")
def test_tower_llm_of_another_width_shares_features(scene: Scene) -> None:
    # Features are keyed by the tower's input to the last bit, and vLLM normalises Qwen's images
    # differently: so both are asked of engines.
    base, wider = scene.engines.get("base"), scene.engines.get("wider")
    SHARED.put(base, salt="widths")
    assert count(base, "hits_total", kind="embedding", source="service_computed") == 1
    passes = scene.encoder.tower_passes()
    answer = SHARED.put(wider, salt="widths")
    assert scene.encoder.tower_passes() == passes
    assert count(wider, "hits_total", kind="embedding", source="service_cached") == 1
    same(answer, scene.own(wider))


@pytest.mark.support("Sharing", "embeddings for a fine-tune with a quantised language model")
def test_tower_fine_tune_with_quantised_llm_shares_embeddings(scene: Scene) -> None:
    """Another name, another revision, other and quantised LLM weights, unknown to the service."""
    tuned, passes = scene.engines.get("tuned"), scene.encoder.tower_passes()
    answer = SHARED.put(tuned, salt=SALT)
    assert scene.encoder.tower_passes() == passes
    assert count(tuned, "hits_total", kind="embedding", source="store") == 1
    assert count(tuned, "saved_tower_passes_total") == 1
    same(answer, scene.own(tuned))


def test_tower_one_value_changed_shares_nothing(scene: Scene) -> None:
    touched, passes = scene.engines.get("touched"), scene.encoder.tower_passes()
    answer = SHARED.put(touched, salt=SALT)
    assert scene.encoder.tower_passes() == passes
    assert count(touched, "hits_total", kind="embedding") == 0
    assert count(touched, "misses_total", kind="embedding") == 1
    same(answer, scene.own(touched))
