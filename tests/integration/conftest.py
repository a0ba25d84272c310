"""Engines are started once for all tests that can share them: a start costs half a minute.

The files' names are their order: test_sharing counts from fresh engines, and the last of
test_survives_faults leaves one of them dead.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from integration.stack import ASKS, Stack, always_sharing, services

from devkit import checkpoints
from devkit.engines import Answer, VllmServer
from devkit.processes import at_once, together

A_ARGS = ("--block-size", "32", "--max-num-batched-tokens", "256")
"""Small blocks and chunked prefill."""


@pytest.fixture(scope="session", autouse=True)
def always_share(own_settings: Path) -> Iterator[None]:
    with always_sharing():
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


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """A folder whose paths are short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="cp-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
