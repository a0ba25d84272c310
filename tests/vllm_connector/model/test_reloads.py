"""An engine whose weights were reloaded shares as the folder that they came from, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.v1.engine.core import EngineCore

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import InitialModel
from cornplug.errors import CheckpointError
from cornplug.vllm_connector.model import model_config, reloads, weight_updates
from cornplug.vllm_connector.model.model_config import kv_identity
from devkit import checkpoints

from ..media.test_mm_identifiers import config as described
from ..wrapped import wrapper_of

sleep = wrapper_of(weight_updates, "EngineCore.sleep")
make_scheduler = wrapper_of(reloads, "Scheduler.__init__")
reload_weights = wrapper_of(reloads, "Worker.reload_weights")
collective_rpc = wrapper_of(weight_updates, "EngineCore.collective_rpc")
reset_prefix_cache = wrapper_of(reloads, "EngineCore.reset_prefix_cache")


class Model(torch.nn.Module):
    """The tensors of a checkpoint, under their published names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tensors: dict[str, torch.nn.Parameter] = {}
        self.load_weights(read(folder))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.tensors.items())

    def load_weights(self, weights: dict[str, torch.Tensor]) -> set[str]:
        self.tensors |= {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
        return set(weights)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


class Rank:
    """A worker, and vLLM's reload of its weights."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model: Any = Model(Path(config.model_config.model))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.then: Callable[[], Any] = lambda: None

    def reload_weights(self, weights_iterator: Any = None, weights_path: str | None = None, **_: Any) -> None:
        def original(worker: Rank, weights_path: str | None) -> None:
            assert weights_guard.has_replaced_weights(), "no process shares meanwhile"
            if weights_path is not None:
                worker.vllm_config.model_config.model = weights_path
            worker.model.load_weights(read(Path(worker.vllm_config.model_config.model)))

        reload_weights(original, self, weights_path)
        self.then()


class Pool:
    """vLLM's blocks."""

    def __init__(self) -> None:
        self.num_gpu_blocks, self.used = 10, 1
        self.cached_block_hash_to_block: list[int] = []

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - self.used


class Core(EngineCore):
    """An engine core with its ranks, and nothing else in it."""

    def __init__(self, config: Any, ranks: int = 1) -> None:
        self.vllm_config = config
        self.pool: Any = Pool()
        self.ranks = [Rank(config) for _ in range(ranks)]
        self.executed: list[Any] = []
        self.scheduler: Any = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(block_pool=self.pool), reset_prefix_cache=self._reset
        )
        self.model_executor: Any = SimpleNamespace(collective_rpc=self._execute, sleep=lambda level: None)
        self.pause_scheduler = lambda **kwargs: None  # type: ignore[method-assign, assignment]

    def _reset(self, running: bool = False, connector: bool = False) -> bool:
        if self.pool.used == 1:
            self.pool.cached_block_hash_to_block.clear()
        return bool(self.pool.used == 1)

    def _execute(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        named = getattr(Rank, method) if isinstance(method, str) else method
        return [named(rank, *args, **(kwargs or {})) for rank in self.ranks]

    def reload(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM calls the hook."""
        return collective_rpc(EngineCore.collective_rpc, self, "reload_weights", None, args, kwargs)

    def reset(self) -> bool:
        return bool(reset_prefix_cache(EngineCore.reset_prefix_cache, self))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "new", llm_seed=21, tower_seed=22)


def engine_config(folder: Path) -> Any:
    config = described(folder)
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="CornplugConnector", kv_connector_extra_config={}
    )
    config.parallel_config = SimpleNamespace(
        data_parallel_size=1, nnodes=1, distributed_executor_backend="mp", enable_eplb=False
    )
    config.load_config.download_dir, config.model_config.model_weights = None, ""
    return config


@pytest.fixture
def core(old: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    """A core that has begun with the old weights."""
    monkeypatch.setattr(model_config, "_initial_llm", InitialModel())
    monkeypatch.setattr(model_config, "_initial_tower", InitialModel())
    engine_state.current().record_core_start()
    core = Core(engine_config(old), ranks=2)
    kv_identity(core.vllm_config)
    return core


def weights(core: Core) -> bytes:
    return kv_identity(core.vllm_config)[0]


def fingerprint(folder: Path) -> bytes:
    return Checkpoint.open(str(folder)).fingerprint("language_model")


def test_reload_names_the_new_weights_and_the_first_ones_again(core: Core, old: Path, new: Path) -> None:
    assert core.reload(weights_path=str(new)) == [None, None]
    assert not weights_guard.has_replaced_weights()
    assert (weights(core), weights_guard.epoch()) == (fingerprint(new), 2)
    core.reload(None, str(old))
    assert (weights(core), weights_guard.epoch()) == (fingerprint(old), 4)


def test_reload_of_the_same_folder_after_it_was_rewritten_names_its_weights(
    core: Core, old: Path, new: Path
) -> None:
    first = weights(core)
    [file] = new.glob("*.safetensors")
    shutil.copy(file, old / file.name)
    core.reload()
    assert weights(core) == fingerprint(new) != first


def test_reload_after_sleep_shares_again(core: Core, new: Path) -> None:
    sleep(EngineCore.sleep, core, 2)
    assert weights_guard.has_replaced_weights()
    assert core.reset()
    assert weights_guard.has_replaced_weights(), "no weights are known"
    core.reload(weights_path=str(new))
    assert weights(core) == fingerprint(new)


@pytest.mark.parametrize("left", ["used", "cached"])
def test_reload_beside_blocks_of_the_old_weights_waits_for_a_reset(core: Core, new: Path, left: str) -> None:
    if left == "used":
        core.pool.used = 3
    else:
        core.pool.cached_block_hash_to_block.append(1)
    core.reload(weights_path=str(new))
    assert (weights_guard.has_replaced_weights(), engine_state.current().has_unknown_weights()) == (
        True,
        False,
    )
    assert core.reset() is (left == "cached")
    if left == "used":
        assert weights_guard.has_replaced_weights()
        core.pool.used = 1
        assert core.reset()
    assert not weights_guard.has_replaced_weights()
    assert weights(core) == fingerprint(new)


def test_reload_that_waits_for_a_reset_is_over_once_the_engine_sleeps(core: Core, new: Path) -> None:
    core.pool.used = 3
    core.reload(weights_path=str(new))
    core.pool.used = 1
    sleep(EngineCore.sleep, core, 2)
    assert core.reset()
    assert weights_guard.has_replaced_weights()


def cut(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(next(n for n in tensors if "layers.1" in n))
    save_file(tensors, file, metadata={"format": "pt"})


def spoil(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if "norm" in n and n.endswith(".weight"))
    save_file({**tensors, name: tensors[name] + 0.5}, file, metadata={"format": "pt"})


def silent(core: Core) -> None:
    """A model that does not tell what it has loaded."""
    model = core.ranks[1].model
    load = model.load_weights
    model.load_weights = lambda weights: load(weights) and None


BEFORE: dict[str, Callable[[Core, Path], Any]] = {
    "part of the tensors": lambda core, new: cut(new),
    "a parameter of its own": lambda core, new: core.ranks[1].model.tensors.update(
        scale=torch.nn.Parameter(torch.ones(1))
    ),
    "silent model": lambda core, new: silent(core),
    "replicas": lambda core, new: setattr(core.vllm_config.parallel_config, "data_parallel_size", 2),
    "hosts": lambda core, new: setattr(core.vllm_config.parallel_config, "nnodes", 2),
    "ray": lambda core, new: setattr(core.vllm_config.parallel_config, "distributed_executor_backend", "ray"),
    "experts": lambda core, new: setattr(core.vllm_config.parallel_config, "enable_eplb", True),
    "quantised": lambda core, new: setattr(core.vllm_config.model_config, "quantization", "fp8"),
    "object store": lambda core, new: setattr(core.vllm_config.model_config, "model_weights", "s3://x"),
    "another engine": lambda core, new: engine_state.current().record_core_start(),
    "consolidated": lambda core, new: shutil.copy(
        next(new.glob("*.safetensors")), new / "consolidated.safetensors"
    ),
}
MEANWHILE: dict[str, Callable[[Core, Path], Any]] = {
    "memory differs": lambda core, new: core.ranks[1].model.load_weights(read(new.parent / "old")),
    "nothing to compare": lambda core, new: core.ranks[1].model.tensors.clear(),
    "file rewritten": lambda core, new: spoil(new),
    "settings written": lambda core, new: shutil.copy(new / "config.json", new / "another.json"),
    "folder gone": lambda core, new: shutil.rmtree(new),
}
CALLS: dict[str, dict[str, Any]] = {
    "tensors": {"weights_iterator": [("a", 1)]},
    "kernel format": {"is_checkpoint_format": False},
    "unknown argument": {"target": "draft"},
}


@pytest.mark.parametrize("what", [*BEFORE, *MEANWHILE, *CALLS])
def test_reload_that_is_not_of_a_known_folder_ends_sharing(
    what: str, core: Core, old: Path, new: Path
) -> None:
    BEFORE.get(what, lambda *_: None)(core, new)
    core.ranks[1].then = lambda: MEANWHILE.get(what, lambda *_: None)(core, new)
    core.reload(weights_path=str(new), **CALLS.get(what, {}))
    assert engine_state.current().has_unknown_weights()
    with pytest.raises(CheckpointError) as caught:
        weights(core)
    assert caught.value.reason == "weights_updated"
    core.ranks[1].then = lambda: None
    core.reload(weights_path=str(old))
    assert weights_guard.has_replaced_weights(), "what was loaded over unknown weights may lack a part"


def test_reload_that_raised_ends_sharing(core: Core, new: Path) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    core.ranks[1].then = broken
    with pytest.raises(RuntimeError, match="memory"):
        core.reload(weights_path=str(new))
    assert engine_state.current().has_unknown_weights()


def test_reload_without_cornplug_is_vllm_s_own(core: Core, new: Path) -> None:
    core.vllm_config.kv_transfer_config = core.vllm_config.ec_transfer_config = None
    core.ranks = []
    assert core.reload(weights_path=str(new)) == []
    assert not weights_guard.has_replaced_weights()


def test_scheduler_init_counts_engine_cores() -> None:
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None), ec_connector=None
    )
    make_scheduler(lambda *_: None, scheduler)
    assert not engine_state.current().has_one_core()
    scheduler.vllm_config.ec_transfer_config = SimpleNamespace(ec_connector="CornplugECConnector")
    make_scheduler(lambda *_: None, scheduler)
    assert engine_state.current().has_one_core()
