"""SGLang's room makes the frozen roots of page keys, with the code that serves requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import page_root_vectors as vectors
import pytest

from cornplug.engine_common import lora_digests
from cornplug.engine_common.lora_digests import BackgroundLoraDigests
from cornplug.sglang_hooks.kv_pages import namespace_roots
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace

from ..hooked import hook_of

load_lora_adapter = hook_of(namespace_roots, "LoRAManager._load_lora_adapter")


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


@pytest.mark.parametrize("name", vectors.CASES)
def test_namespace_roots_equal_golden_vectors(name: str, tmp_path: Path) -> None:
    case = vectors.CASES[name]
    path = vectors.adapter(tmp_path / "lora")
    # SGLang's LoRAManager, which applies all of the adapter, as vLLM does.
    applied = SimpleNamespace(layers=[SimpleNamespace(weights={"q_proj": None})], embedding_layers={})
    manager = SimpleNamespace(loras={"an-id": applied}, target_modules={"q_proj"})
    load_lora_adapter(manager, SimpleNamespace(lora_id="an-id", lora_path=path, lora_name="a"))
    made = NamespaceRoots(vectors.SECRET, vectors.PAGE, lambda: vectors.IDENTITY)
    assert made.wait(60)
    # SGLang appends the adapter's id to the user's extra_key, of which there is none.
    space = CacheNamespace("an-id" if case.lora else None, case.salt)
    assert made.root(space).hex() == vectors.known()[name]


def test_roots_of_all_cases_are_in_golden_file() -> None:
    assert json.loads(vectors.GOLDEN.read_text()).keys() == vectors.CASES.keys()


def test_roots_of_another_kind_of_pages_read_the_checkpoint_once() -> None:
    read = []

    def identify() -> tuple[bytes, dict[str, Any]]:
        read.append(1)
        return vectors.IDENTITY

    full = NamespaceRoots(vectors.SECRET, vectors.PAGE, identify)
    assert full.wait(60)
    windows = full.for_page(replace(vectors.PAGE, engine="sglang"))
    space = CacheNamespace(None, None)
    roots = {full.root(space), windows.root(space), full.root(space), windows.root(space)}
    assert (len(roots), len(read)) == (2, 1)
