"""A server whose weights were replaced from a folder shares as that folder, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt import runtime_context
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import io_struct, mm_schedule
from sglang.srt.server_args import ServerArgs

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import EngineModel, InitialModel
from cornplug.errors import CheckpointError
from cornplug.identity import placeholder_tokens as values_of
from cornplug.sglang_hooks import weight_epochs
from cornplug.sglang_hooks.media import placeholder_tokens
from cornplug.sglang_hooks.model import model_config
from devkit import checkpoints

from .hooked import hook_of

tokenizer_update = hook_of(weight_epochs, "TokenizerManager.update_weights_from_disk")
scheduler_update = hook_of(weight_epochs, "SchedulerWeightUpdaterManager.update_weights_from_disk")


def described(folder: Path) -> EngineModel:
    args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32")
    return model_config.describe(args, ModelConfig.from_server_args(args))


class Rank:
    """A rank's weights in memory, and SGLang's update of them."""

    def __init__(self, folder: Path) -> None:
        self.group_says = 1
        self.settings: dict[str, Any] = dict.fromkeys(("quantization", "language_only", "encoder_urls"), None)
        self.settings |= {
            "dp_size": 1,
            "pp_size": 1,
            "nnodes": 1,
            "enable_adaptive_dispatch_to_encoder": False,
        }
        assert self.settings.keys() <= {field.name for field in msgspec.structs.fields(ServerArgs)}
        self.draft_worker: Any = None
        self.tp_cpu_group = None
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.load(folder)

    def load(self, folder: Path) -> None:
        self.tensors = [load_file(file) for file in folder.glob("*.safetensors")]

    def named_parameters(self) -> Any:
        return ((name, torch.nn.Parameter(t)) for found in self.tensors for name, t in found.items())

    def update(self, folder: Path, then: Callable[[], Any] = lambda: None, **fields: Any) -> None:
        """As SGLang calls the hook; `then` runs once the folder is loaded."""

        def original(manager: Any, recv_req: Any) -> Any:
            assert weights_guard.has_replaced_weights(), "no process shares meanwhile"
            self.load(Path(recv_req.model_path))
            then()
            return SimpleNamespace(success=True)

        asked = {"load_format": "auto", "model_path": str(folder), **fields}
        scheduler_update(original, self, io_struct.UpdateWeightFromDiskReqInput(**asked))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "new", llm_seed=21, tower_seed=22)


@pytest.fixture
def rank(old: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """The first of its server's ranks, which has begun with the old weights."""
    rank = Rank(old)
    monkeypatch.setenv("CORNPLUG_SGLANG", "{}")
    monkeypatch.setattr(model_config, "_started", InitialModel())
    monkeypatch.setattr(model_config, "_describe_running", lambda: described(old))
    model = SimpleNamespace(hf_config=SimpleNamespace())
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    monkeypatch.setattr(overrides, "resolved_view", lambda _: SimpleNamespace(**rank.settings))
    monkeypatch.setattr(overrides, "model_config_of", lambda _: model)

    def all_reduce(vote: torch.Tensor, **_: Any) -> None:
        vote[0] = min(int(vote[0]), rank.group_says)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    model_config.engine_model()
    return rank


def names() -> tuple[bytes, bytes]:
    """(language model, tower and projector)"""
    model = model_config.engine_model()
    return model.kv_identity()[0], model.tower_identity().identity


def test_disk_update_names_the_new_weights_and_the_first_ones_again(old: Path, new: Path, rank: Rank) -> None:
    first = names()
    rank.update(new)
    assert not weights_guard.has_replaced_weights()
    assert weights_guard.epoch() == 2
    fresh = described(new)
    assert model_config.engine_model().kv_identity() == fresh.kv_identity()
    assert model_config.engine_model().tower_identity() == fresh.tower_identity()
    assert not set(names()) & set(first)
    rank.update(old)
    assert (names(), weights_guard.epoch()) == (first, 4)


def test_disk_update_config_of_new_folder_is_not_what_runs(new: Path, rank: Rank) -> None:
    """SGLang goes on with the config that it has."""
    text = (new / "config.json").read_text()
    (new / "config.json").write_text(text.replace('"rope_theta": ', '"rope_theta": 7'))
    rank.update(new)
    _, spec = model_config.engine_model().kv_identity()
    assert spec != described(new).kv_identity()[1]


def test_disk_update_of_a_process_second_engine_is_of_its_model(
    old: Path, new: Path, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = checkpoints.qwen2_vl(tmp_path / "other", max_pixels=28 * 28 * 16)
    rank.update(new)
    monkeypatch.setattr(model_config, "_describe_running", lambda: described(other))
    engine_state.record_engine_start(fresh=True)
    model_config.engine_model()
    rank.update(new)
    assert model_config.engine_model().checkpoint.preprocessors == described(other).checkpoint.preprocessors


def test_disk_update_forgets_media_and_embeddings(
    new: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(mm_schedule, "embedding_cache", SimpleNamespace(clear=lambda: cleared.append(True)))
    placeholder_tokens.remember_identity(b"i" * 32)
    rank.update(new)
    assert cleared
    assert not any(map(placeholder_tokens.is_keyed, values_of(b"i" * 32)))


def spoil(new: Path) -> None:
    [file] = new.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if "norm" in n and n.endswith(".weight"))
    save_file({**tensors, name: tensors[name] + 0.5}, file, metadata={"format": "pt"})


def cut(new: Path) -> None:
    [file] = new.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(next(n for n in tensors if "layers.1" in n))
    save_file(tensors, file, metadata={"format": "pt"})


BEFORE: dict[str, Callable[[Rank, Path], Any]] = {
    "one rank votes no": lambda rank, new: setattr(rank, "group_says", 0),
    "part of the tensors": lambda rank, new: cut(new),
    "draft": lambda rank, new: setattr(rank, "draft_worker", object()),
    "pipeline": lambda rank, new: rank.settings.update(pp_size=2),
    "replicas": lambda rank, new: rank.settings.update(dp_size=2),
    "quantised": lambda rank, new: rank.settings.update(quantization="fp8"),
    "encoders": lambda rank, new: rank.settings.update(encoder_urls=["http://x"]),
}
MEANWHILE: dict[str, Callable[[Rank, Path], Any]] = {
    "memory differs": lambda rank, new: rank.load(new.parent / "old"),
    "nothing to compare": lambda rank, new: rank.tensors.clear(),
    "file rewritten": lambda rank, new: spoil(new),
    "settings written": lambda rank, new: shutil.copy(new / "config.json", new / "another.json"),
    "folder gone": lambda rank, new: shutil.rmtree(new),
}
FIELDS: dict[str, dict[str, Any]] = {
    "cache not flushed": {"flush_cache": False},
    "loader of its own": {"load_format": "dummy"},
}


@pytest.mark.parametrize("what", [*BEFORE, *MEANWHILE, *FIELDS])
def test_disk_update_that_failed_in_part_ends_sharing(what: str, old: Path, new: Path, rank: Rank) -> None:
    BEFORE.get(what, lambda *_: None)(rank, new)
    rank.update(new, lambda: MEANWHILE.get(what, lambda *_: None)(rank, new), **FIELDS.get(what, {}))
    assert weights_guard.has_replaced_weights()
    with pytest.raises(CheckpointError) as caught:
        names()
    assert caught.value.reason == "weights_updated"
    # Tensors that the next folder lacks would stay.
    rank.group_says, rank.draft_worker = 1, None
    rank.update(old)
    assert weights_guard.has_replaced_weights()


def test_disk_update_that_raised_votes_no(new: Path, rank: Rank) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        rank.update(new, broken)
    assert engine_state.current().has_unknown_weights()


def test_disk_update_after_update_by_wire_stays_off(new: Path, rank: Rank) -> None:
    weights_guard.record_replacement("update_weights_from_tensor", weight_epochs.logger)
    rank.update(new)
    assert weights_guard.has_replaced_weights()


def test_disk_update_on_its_way_pauses_sharing(new: Path, rank: Rank) -> None:
    tokenizer_update(None, io_struct.UpdateWeightFromDiskReqInput(model_path=str(new)))
    assert weights_guard.has_replaced_weights()
    rank.update(new)
    assert not weights_guard.has_replaced_weights()
