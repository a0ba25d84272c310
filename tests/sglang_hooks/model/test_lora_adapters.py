"""Adapters in the root of page keys: their bytes, which of them SGLang applies, and at what cost."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.lora.utils import get_target_module_name

from cornplug.engine_common import lora_digests
from cornplug.engine_common.lora_digests import BackgroundLoraDigests, LoraDigests
from cornplug.errors import CheckpointError
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks.kv_pages import namespace_roots
from cornplug.sglang_hooks.kv_pages.namespace_roots import CallRoots, NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace

from ..hooked import hook_of

load_lora_adapter = hook_of(namespace_roots, "LoRAManager._load_lora_adapter")
_NUMBERS = itertools.count()

WEIGHTS = ("q_proj", "k_proj", "o_proj", "down_proj")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (
        ("_paths", {}),
        ("_managers", {}),
        ("_skipped_weights", {}),
        ("_ambiguous_ids", set()),
    ):
        monkeypatch.setattr(namespace_roots, name, empty)
    monkeypatch.setattr(namespace_roots, "_files", BackgroundLoraDigests())
    monkeypatch.setattr(lora_digests, "_CHECK_TIMEOUT_S", 10)  # a busy machine
    monkeypatch.setattr(namespace_roots.activation, "is_on", lambda: True)


def folder(path: Path, *, target_modules: Any = "all-linear") -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": target_modules}))
    tensors = {
        f"base_model.model.model.layers.0.x.{module}.lora_{part}.weight": torch.ones(4, 4)
        for module in WEIGHTS
        for part in "AB"
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def manager(*targets: str, embeddings: tuple[str, ...] = ()) -> Any:
    """As SGLang's LoRAManager after `--lora-target-modules TARGETS`."""
    weights = {f"layers.0.x.{module}.lora_A.weight": None for module in WEIGHTS}
    loaded = SimpleNamespace(
        layers=[SimpleNamespace(weights=weights)], embedding_layers=dict.fromkeys(embeddings)
    )
    name = f"id-{next(_NUMBERS):04}"
    return SimpleNamespace(name=name, loras={name: loaded}, target_modules=set(targets))


def load(of: Any, path: Path, name: str = "") -> None:
    """SGLang loads an adapter, of the manager's own name or another one."""
    load_lora_adapter(of, SimpleNamespace(lora_id=name or of.name, lora_path=str(path), lora_name="one"))


def root(of: Any, path: Path) -> bytes:
    """Root of pages under an adapter that was loaded."""
    load(of, path)
    return roots().root(CacheNamespace(of.name, None))


def roots() -> NamespaceRoots:
    page = PageGeometry(page_tokens=16, heads=1, layers=1, dim=8, dtype="float32")
    return NamespaceRoots(b"s" * 32, page, lambda: (b"l" * 32, {"config": {}}))


def test_lora_adapters_fewer_target_modules_change_root(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    whole = root(manager(*WEIGHTS), path)
    assert root(manager(*WEIGHTS, "gate_proj"), path) == whole  # nothing of this adapter left out
    attention = root(manager("q_proj", "k_proj", "o_proj"), path)
    only_query, again = manager("q_proj"), manager(*WEIGHTS)
    query = root(only_query, path)
    assert len({whole, attention, query}) == 3
    # What vLLM has for it, which applies all of an adapter or refuses it.
    assert namespace_roots.split_extra_key(only_query.name)[1] != LoraDigests().digest(str(path))
    assert root(again, path) == whole
    assert namespace_roots.split_extra_key(again.name)[1] == LoraDigests().digest(str(path))


def test_lora_adapters_left_out_embeddings_change_root(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    names = ("base_model.model.lm_head.lora_A.weight",)
    assert root(manager(*WEIGHTS, embeddings=names), path) != root(
        manager(*WEIGHTS, "lm_head", embeddings=names), path
    )


def test_sglang_finds_target_module_of_weight() -> None:
    targets = {"qkv_proj", "o_proj"}
    assert get_target_module_name("layers.0.self_attn.qkv_proj.lora_A", targets) == "qkv_proj"
    with pytest.raises(ValueError, match="mlp"):
        get_target_module_name("layers.0.mlp.down_proj.lora_A", targets)


def test_lora_adapters_unloaded_before_lookup_are_refused(tmp_path: Path) -> None:
    of = manager(*WEIGHTS)
    load(of, folder(tmp_path / "a"))
    of.loras.clear()
    with pytest.raises(CheckpointError):
        roots().root(CacheNamespace(of.name, None))


def test_lora_adapters_of_several_files_are_refused(tmp_path: Path) -> None:
    """SGLang loads each *.safetensors of the folder, vLLM the one of the usual name."""
    path = folder(tmp_path / "a")
    save_file({"layers.1.x.q_proj.lora_A.weight": torch.zeros(4, 4)}, path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors") as refused:
        root(manager(*WEIGHTS), path)
    assert refused.value.reason == "lora_files"


def test_roots_of_call_stat_files_once_for_many_pages(tmp_path: Path, monkeypatch: Any) -> None:
    path, of = folder(tmp_path / "a"), manager(*WEIGHTS)
    root(of, path)
    for number in range(500):
        load(of, path, f"id-other-{number:03}")
    stats = 0
    stat = Path.stat

    def counted(self: Path, **kwargs: Any) -> os.stat_result:
        nonlocal stats
        stats += 1
        return stat(self, **kwargs)

    monkeypatch.setattr(Path, "stat", counted)
    call = CallRoots(roots())
    assert len({call.root(CacheNamespace(of.name, None)) for _ in range(2048)}) == 1
    assert stats < 20


def test_roots_of_call_after_file_change_are_refused(tmp_path: Path) -> None:
    path, of = folder(tmp_path / "a"), manager(*WEIGHTS)
    root(of, path)
    made = roots()
    made.root(CacheNamespace(of.name, None))
    (path / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError) as refused:
        CallRoots(made).root(CacheNamespace(of.name, None))
    assert refused.value.reason == "lora_changed"


def test_lora_adapters_changed_during_load_are_refused(tmp_path: Path) -> None:
    """Which of the two it has, nobody can say; a copy that keeps sizes and times hides nothing."""
    path = folder(tmp_path / "a")
    file = path / "adapter_model.safetensors"
    of = manager(*WEIGHTS)
    load(of, path)
    known, times = namespace_roots.split_extra_key(of.name)[1], file.stat()
    time.sleep(0.05)  # beyond the tick of the files' clock
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert known is not None
    with pytest.raises(CheckpointError) as refused:
        namespace_roots.split_extra_key(of.name)
    assert refused.value.reason == "lora_changed"
