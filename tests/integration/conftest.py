"""Engines are started once for all tests that can share them: a start costs half a minute.

The files' names are their order: test_sharing counts from fresh engines, and the last of
test_survives_faults leaves one of them dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from integration.stack import ASKS, Stack, services

from devkit import checkpoints
from devkit.engines import Answer, VllmServer
from devkit.processes import at_once, together

A_ARGS = ("--block-size", "32", "--max-num-batched-tokens", "256")
"""Small blocks and chunked prefill."""


@pytest.fixture(scope="session", autouse=True)
def whatever_is_there_is_shared(own_settings: Path) -> Iterator[None]:
    """These models are computed as quickly as they are loaded, and by their own measurements engines
    would share little: it is the sharing that is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORNPLUG_STORE_LOAD_WHEN", "always")
        patch.setenv("CORNPLUG_ENCODER_DEADLINE_FLOOR_S", "60")
        # A busy machine may be late: only tests of lateness give their engines shorter times.
        patch.setenv("CORNPLUG_STORE_DEADLINE_S", "5")
        patch.setenv("CORNPLUG_STORE_BACKGROUND_TIMEOUT_S", "10")
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two LLaVAs over one bit-identical CLIP tower, and a Qwen2-VL."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "a": checkpoints.llava(folder / "a", tower_seed=0, llm_seed=1),
        "b": checkpoints.llava(folder / "b", tower_seed=0, llm_seed=2, hidden_size=128, layers=3),
        "q": checkpoints.qwen2_vl(folder / "q"),
    }


@pytest.fixture(scope="session")
def stock(
    models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Answer]:
    """Answers of stock engines to every ask, by (model, index)."""
    folder = tmp_path_factory.mktemp("stock")

    args = {"a": A_ARGS, "b": (), "q": ()}
    servers = {name: VllmServer(models[name], *args[name], log=folder / f"{name}.log") for name in models}
    # They start side by side and answer one after the other: their times are limits in test_survives_faults.
    with together(*servers.values()):
        return {(name, i): ask.put(servers[name]) for name in models for i, ask in enumerate(ASKS)}


@pytest.fixture(scope="session")
def stack(
    models: Mapping[str, Path],
    stock: dict[tuple[str, int], Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """Store, encoder service, and engines a and b that share."""
    with services(tmp_path_factory.mktemp("stack"), models, stock) as stack:
        a = stack.vllm("a", "a", *A_ARGS, hurried=True)
        engines = {"a": a, "b": stack.vllm("b", "b")}
        at_once(stack.encoder.start, lambda: stack.start(**engines))
        yield stack
