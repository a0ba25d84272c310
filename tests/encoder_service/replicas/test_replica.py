"""Replicas: real processes that load tiny checkpoints, compute, are killed, and come back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.executor import EncodeBatch, compute_batch
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply
from cornplug.encoder_service.model_loader import CompiledTower
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.replica import (
    ReplicaExecutor,
    ReplicaMetrics,
    ReplicaProcess,
    ReplicaSettings,
    count_cores,
    open_replicas,
    replica_devices,
)
from cornplug.encoder_service.replica_messages import OpenModels, ReplicaReady, SharedBuffer
from cornplug.encoder_service.towers.base import TowerItem
from cornplug.errors import CheckpointError, ConfigError, ReplicaLost
from devkit import checkpoints

from ..conftest import SECRET, Requests, eventually, plant_modules
from ..tower_rig import wire
from ..towers.test_towers import CASES

pytestmark = pytest.mark.more

ONE_THREAD = ReplicaSettings(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def front(llava_pair: tuple[Path, Path], qwen: Path) -> ModelRegistry:
    """As the service holds it beside replicas: it checks inputs, and has no weights."""
    return ModelRegistry.open([str(p) for p in (*llava_pair, qwen)], dtype="float32", device="meta")


@pytest.fixture(scope="module")
def replicas(front: ModelRegistry) -> Iterator[list[ReplicaExecutor]]:
    """Two, on the CPU."""
    made = open_replicas(["cpu", "cpu"], ONE_THREAD, front.loaded_models())
    yield made
    for replica in made:
        replica.close()


@pytest.fixture
def encoder(front: ModelRegistry, replicas: list[ReplicaExecutor]) -> Iterator[EncoderCore]:
    for replica in replicas:
        assert replica.wait_ready(60)
    made = EncoderCore(front, ResultCache(None, deadline_s=1.0), secret=SECRET, executors=replicas)
    yield made
    made.close()


def kill(replica: ReplicaExecutor) -> int:
    pid = replica.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def ok(future: Future[EncodeResult]) -> EncodeReply:
    answer = future.result(60)
    assert isinstance(answer, EncodeReply), answer
    return answer


def test_replica_embeddings_equal_in_process(
    encoder: EncoderCore,
    registry: ModelRegistry,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    qwen: Path,
) -> None:
    for path in (*llava_pair, qwen):
        request = request_for(path, 1)
        answer = ok(encoder.submit(request))
        here = registry.find_by_identity(request.identity)
        assert here is not None
        item = here.tower.prepare(request.inputs)
        task = EncodeBatch(items=(item,), features=(None,), targets=((here, 0),), returns_features=False)
        (want,) = compute_batch(task).embeddings
        assert answer.tensor is not None
        got = torch.frombuffer(bytearray(answer.tensor.data), dtype=torch.float32).reshape(want.shape)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    # The second LLaVA had its features from what the service kept of the first.
    assert ok(encoder.submit(request_for(llava_pair[1], 1))).origin == "cached"


def test_registry_on_meta_device_holds_no_weights(front: ModelRegistry) -> None:
    for loaded in front.loaded_models():
        parts = [v for half in (loaded.tower, loaded.projector) for v in vars(half).values()]
        tensors = [p for m in parts if isinstance(m, torch.nn.Module) for p in m.parameters()]
        assert tensors
        assert all(t.is_meta for t in tensors)


@pytest.mark.parametrize("name", CASES)
def test_tower_every_family_checks_inputs_without_weights(name: str, tmp_path: Path) -> None:
    """The front process does so where replicas have the weights."""
    path = CASES[name].make(tmp_path / "tiny")
    front, whole = (ModelRegistry.open([str(path)], dtype="float32", device=d) for d in ("meta", "cpu"))
    given = wire(CASES[name].inputs(path)[0])
    here, there = front.loaded_models()[0].tower.prepare(given), whole.loaded_models()[0].tower.prepare(given)
    assert CompiledTower(whole.loaded_models()[0].tower).layers, "--compile would do nothing"
    assert (here.digests, here.tokens, here.geometry) == (there.digests, there.tokens, there.geometry)


def test_tower_item_every_field_reaches_a_replica() -> None:
    """A new one needs a place in `replica_wire.MediaInput`, or replicas would compute without it. Features
    are named before they are computed, so `names_digest` stays in front."""
    assert {field.name for field in fields(TowerItem)} == {"tensors", "names_digest", "tokens", "geometry"}


def test_replica_tower_error_fails_batch_without_restart(
    replicas: list[ReplicaExecutor], front: ModelRegistry, request_for: Requests, qwen: Path
) -> None:
    loaded = front.find_by_name(str(qwen))
    assert loaded is not None
    assert replicas[0].wait_ready(60)
    item = loaded.tower.prepare(request_for(qwen, 1).inputs)
    broken = TowerItem(tensors=(item.tensors[0][:-1], item.tensors[1]), tokens=item.tokens)
    pid = replicas[0].pid
    with pytest.raises(RuntimeError, match="Error"):
        replicas[0].run(
            EncodeBatch(items=(broken,), features=(None,), targets=((loaded, 0),), returns_features=False)
        )
    good = replicas[0].run(
        EncodeBatch(items=(item,), features=(None,), targets=((loaded, 0),), returns_features=True)
    )
    assert set(good.features) == {0}
    assert replicas[0].pid == pid


def test_replica_killed_while_idle_fails_no_request(
    encoder: EncoderCore, replicas: list[ReplicaExecutor], request_for: Requests, qwen: Path
) -> None:
    old = kill(replicas[0])
    for seed in range(10, 16):
        ok(encoder.submit(request_for(qwen, seed)))
    eventually(lambda: replicas[0].exit_counts["died"] == 1)
    assert "SIGKILL" in replicas[0].problem
    assert replicas[0].wait_ready(60)
    assert replicas[0].pid != old
    assert encoder.is_healthy()


def test_replica_killed_while_computing_batch_runs_again(
    encoder: EncoderCore, replicas: list[ReplicaExecutor], request_for: Requests, qwen: Path
) -> None:
    # Stopped, a process holds what it was given until it is killed.
    stopped = [replica for replica in replicas if replica.pid]
    assert len(stopped) == 2
    os.kill(stopped[0].pid or 0, signal.SIGSTOP)
    futures = [encoder.submit(request_for(qwen, seed)) for seed in range(20, 26)]
    time.sleep(0.3)
    kill(stopped[0])
    assert {type(f.result(60)) for f in futures} == {EncodeReply}


def test_replicas_all_killed_refuse_at_once_then_recover(
    encoder: EncoderCore, replicas: list[ReplicaExecutor], request_for: Requests, qwen: Path
) -> None:
    for replica in replicas:
        assert replica.wait_ready(60)
    before = [replica.exit_counts["died"] for replica in replicas]
    for replica in replicas:
        os.kill(replica.pid or 0, signal.SIGSTOP)
    held = [encoder.submit(request_for(qwen, seed)) for seed in range(30, 34)]
    time.sleep(0.2)
    for replica in replicas:
        kill(replica)
    for future in held:
        refused = future.result(10)
        assert isinstance(refused, EncodeRefusal)
        assert refused.reason == "internal"
        assert refused.retry_after_s
    if not encoder.is_healthy():
        answer = encoder.submit(request_for(qwen, 35)).result(5)
        assert isinstance(answer, EncodeRefusal)
        assert (answer.reason, bool(answer.retry_after_s)) == ("overloaded", True)
        assert "no replica" in answer.message
    # A supervisor notices the end after the request that lost its process.
    eventually(lambda: [replica.exit_counts["died"] for replica in replicas] == [n + 1 for n in before])
    registry = CollectorRegistry()
    registry.register(ReplicaMetrics(replicas))
    died = [
        registry.get_sample_value("cornplug_encoder_replica_ends_total", {"replica": n, "reason": "died"})
        for n in "01"
    ]
    assert died == [n + 1 for n in before]


def test_replica_close_leaves_no_process(replicas: list[ReplicaExecutor]) -> None:
    eventually(lambda: replicas[0].pid is not None)
    pid = replicas[0].pid
    replicas[0].close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ReplicaLost):
        replicas[0].run(EncodeBatch(items=(), features=(), targets=(), returns_features=False))


def test_open_replicas_unloadable_model_stops_the_start(tmp_path: Path) -> None:
    path = checkpoints.qwen2_vl(tmp_path / "q")
    served = ModelRegistry.open([str(path)], dtype="float32", device="meta").loaded_models()
    # Other weights by the time the replica reads them.
    shutil.rmtree(path)
    checkpoints.qwen2_vl(path, tower_seed=9)
    with pytest.raises(CheckpointError, match="differ from the weights"):
        open_replicas(["cpu"], ONE_THREAD, served)


@pytest.mark.parametrize(
    ("device", "replicas", "words"),
    [
        ("cpu", count_cores() + 1, f"{count_cores()} cores"),
        ("cpu", -1, "were requested"),
        ("cuda", 4096, "GPUs"),
        ("cuda:1", 2, "is a single GPU"),
    ],
)
def test_devices_of_more_replicas_than_devices_is_an_error(device: str, replicas: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        replica_devices(device, replicas)
    assert error.value.field == "--replicas"


def test_shared_buffer_grows_and_returns_every_dtype() -> None:
    one = SharedBuffer.new()
    other = SharedBuffer(os.dup(one.fd))
    for rows in (3, 3000):
        tensors = [
            torch.randn(rows, 5), torch.randn(2, rows).bfloat16(), torch.arange(rows), torch.empty(0, 4),
            torch.tensor([True, False]),
        ]  # fmt: skip
        for row, tensor in zip(one.write(tensors), tensors, strict=True):
            assert torch.equal(other.view(row), tensor)
    one.close()
    other.close()


def test_replica_process_in_folder_with_planted_modules_does_not_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_modules(tmp_path, "torch.py", "cornplug/__init__.py")
    monkeypatch.chdir(tmp_path)
    process = ReplicaProcess(1)
    try:
        answer = process.send_control(
            OpenModels(models=(), dtype="float32", device="cpu", threads=1, compile=False)
        )
        assert answer == ReplicaReady(identities=())
    finally:
        process.terminate()
    assert not list(tmp_path.glob("imported-*"))
