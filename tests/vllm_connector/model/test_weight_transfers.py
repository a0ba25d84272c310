"""An engine whose weights a trainer replaced shares under the trainer's version, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from vllm.v1.engine.core import EngineCore

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import InitialModel
from cornplug.vllm_connector.model import model_config, weight_updates
from cornplug.vllm_connector.model.model_config import kv_identity, tower_identity
from devkit import checkpoints

from ..wrapped import wrapper_of
from .test_reloads import Core, Pool, Rank, engine_config

sleep = wrapper_of(weight_updates, "EngineCore.sleep")
rpc_of_api = wrapper_of(weight_updates, "AsyncLLM.collective_rpc")
collective_rpc = wrapper_of(weight_updates, "EngineCore.collective_rpc")
set_weight_version = wrapper_of(weight_updates, "EngineCore.set_weight_version")

TRUST = {"engine.trust_weight_version": "true"}


class TransferRank(Rank):
    """A worker, and vLLM's transfer of weights to it."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.weights = 0
        self.then = lambda: None
        self._weight_update_active = self._weight_update_is_draft = self.is_stuck = False

    def start_weight_update(self) -> None:
        assert weights_guard.has_replaced_weights(), "no process shares meanwhile"
        if self._weight_update_active:
            raise RuntimeError("a weight update is already active")
        self._weight_update_active, self._weight_update_is_draft = True, False

    def start_draft_weight_update(self) -> None:
        self._weight_update_active = self._weight_update_is_draft = True

    def update_weights(self, update_info: Any = None) -> None:
        assert weights_guard.has_replaced_weights(), "no process shares meanwhile"
        self._require()
        self.weights += 1
        self.then()

    def finish_weight_update(self) -> None:
        self._require()
        self._weight_update_active = self.is_stuck

    def _require(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before")


class TransferCore(Core):
    """An engine core with ranks that take weights from a trainer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, ranks=0)
        self.ranks: list[Any] = [TransferRank(config) for _ in range(2)]
        self._weight_version = "default"

    def _execute(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        named = getattr(TransferRank, method) if isinstance(method, str) else method
        return [named(rank, *args, **(kwargs or {})) for rank in self.ranks]

    def call(self, method: str, **kwargs: Any) -> Any:
        """As vLLM calls the hooks of the API process and of the core."""
        api = SimpleNamespace(vllm_config=self.vllm_config)

        def core(_: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            return collective_rpc(EngineCore.collective_rpc, self, method, None, args, kwargs)

        return rpc_of_api(core, api, method, **kwargs)

    def name(self, version: str) -> None:
        """`/update_weight_version`"""
        set_weight_version(EngineCore.set_weight_version, self, version)

    def finish(self, version: str | None) -> None:
        """As vLLM's `finish_weight_update`."""
        self.call("finish_weight_update")
        if version is not None:
            self.name(version)

    def update(self, version: str | None, chunks: int = 2) -> None:
        self.call("start_weight_update")
        for _ in range(chunks):
            self.call("update_weights", update_info={})
        self.finish(version)


def shares_as() -> str | None:
    """The version that this engine shares as; None where it shares nothing."""
    source = engine_state.current().source()
    return None if source is None else source.version


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model_config, "_initial_llm", InitialModel())
    monkeypatch.setattr(model_config, "_initial_tower", InitialModel())
    config = engine_config(checkpoints.qwen2_vl(tmp_path / "old"))
    config.kv_transfer_config.kv_connector_extra_config = dict(TRUST)
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    return config


@pytest.fixture
def core(config: Any) -> TransferCore:
    """A core before its first update."""
    engine_state.current().record_core_start()
    return TransferCore(config)


def test_weight_transfer_names_weights_and_the_first_ones_again(core: TransferCore) -> None:
    def names() -> tuple[bytes, bytes]:
        return kv_identity(core.vllm_config)[0], tower_identity(core.vllm_config).identity

    found = [names()]
    for version in ("run/1", "run/2", "run/1"):
        core.update(version)
        assert shares_as() == version
        found.append(names())
    assert found[1] == found[3]
    assert len({part for pair in found for part in pair}) == 6
    assert weights_guard.epoch() == 6
    assert tower_identity(core.vllm_config).served_identity is None


def test_weight_transfer_in_chunks_is_named_at_its_end_alone(core: TransferCore) -> None:
    core.call("start_weight_update")
    for _ in range(3):
        core.call("update_weights", update_info={})
        core.name("6")
        assert weights_guard.has_replaced_weights()
    core.call("finish_weight_update")
    assert weights_guard.has_replaced_weights()
    core.name("7")
    assert (shares_as(), weights_guard.epoch()) == ("7", 2)
    core.name("8")
    assert shares_as() == "7", "the weights are the same"


@pytest.mark.parametrize("version", [None, "", " ", "default", "v" * 1025])
def test_weight_transfer_without_a_name_is_off_until_one_comes(
    version: str | None, core: TransferCore
) -> None:
    core.update(version)
    assert weights_guard.has_replaced_weights()
    assert not engine_state.current().has_unknown_weights()
    core.update("9")
    assert shares_as() == "9"


def test_weight_transfer_with_the_version_before_it_is_off_until_another_comes(core: TransferCore) -> None:
    core.update("7")
    core.update("7")
    assert weights_guard.has_replaced_weights()
    core.name("8")
    assert shares_as() == "8"


@pytest.mark.parametrize("left", ["used", "cached"])
def test_weight_transfer_beside_blocks_of_old_weights_waits_for_a_reset(
    core: TransferCore, left: str
) -> None:
    if left == "used":
        core.pool.used = 3
    else:
        core.pool.cached_block_hash_to_block.append(1)
    core.update("7")
    assert weights_guard.has_replaced_weights()
    core.pool.used = 1
    assert core.reset()
    assert shares_as() == "7"


def test_weight_transfer_that_waits_is_over_once_the_engine_sleeps(core: TransferCore) -> None:
    core.pool.used = 3
    core.update("7")
    sleep(EngineCore.sleep, core, 2)
    core.pool.used = 1
    core.reset()
    core.name("8")
    assert weights_guard.has_replaced_weights()
    core.update("9")
    assert shares_as() == "9"


def fails(core: TransferCore) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    core.ranks[1].then = broken


def parallel(**fields: Any) -> Callable[[TransferCore], None]:
    return lambda core: vars(core.vllm_config.parallel_config).update(fields)


LOST: dict[str, Callable[[TransferCore], Any]] = {
    "failed on one rank": fails,
    "still active on one rank": lambda core: setattr(core.ranks[1], "is_stuck", True),
    "patches": lambda core: setattr(core.vllm_config.weight_transfer_config, "backend", "sparse_nccl"),
    "replicas": parallel(data_parallel_size=2),
    "hosts": parallel(nnodes=2),
    "ray": parallel(distributed_executor_backend="ray"),
    "experts": parallel(enable_eplb=True),
    "quantised": lambda core: setattr(core.vllm_config.model_config, "quantization", "fp8"),
    "another engine": lambda core: engine_state.current().record_core_start(),
    "unknown before": lambda core: core.call("start_draft_weight_update"),
    "trainer's own method": lambda core: setattr(
        core.ranks[1], "then", lambda: weight_updates._handle_call("x")
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_weight_transfer_that_cannot_be_followed_ends_sharing(what: str, core: TransferCore) -> None:
    LOST[what](core)
    try:
        core.update("7")
    except RuntimeError:
        assert what in ("failed on one rank", "unknown before")
    assert engine_state.current().has_unknown_weights()
    core.ranks[1].then = lambda: None
    for rank in core.ranks:
        rank._weight_update_active = False
    core.update("8")
    assert weights_guard.has_replaced_weights()


@pytest.mark.parametrize(("active", "draft"), [(True, False), (False, True)])
def test_rank_is_done_not_within_a_transfer_nor_after_a_draft_s(active: bool, draft: bool) -> None:
    rank = SimpleNamespace(_weight_update_active=active, _weight_update_is_draft=draft)
    assert not weight_updates.is_rank_done(SimpleNamespace(worker=rank))


def test_weight_transfer_whose_ranks_do_not_answer_ends_sharing(
    core: TransferCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(_: Any) -> bool:
        raise TimeoutError

    monkeypatch.setattr(weight_updates, "is_rank_done", dead)
    core.update("7")
    assert engine_state.current().has_unknown_weights()


def test_weight_transfer_where_versions_are_not_trusted_ends_sharing(core: TransferCore) -> None:
    core.vllm_config.kv_transfer_config.kv_connector_extra_config = {}
    core.update("7")
    assert engine_state.current().has_unknown_weights()


def test_weight_transfer_of_an_engine_that_shares_embeddings_alone_is_named(core: TransferCore) -> None:
    core.vllm_config.kv_transfer_config = None
    core.vllm_config.ec_transfer_config = SimpleNamespace(
        ec_connector="CornplugECConnector", ec_connector_extra_config=dict(TRUST)
    )
    core.update("7")
    assert shares_as() == "7"


def test_weight_transfer_without_cornplug_is_vllm_s_own(core: TransferCore) -> None:
    core.vllm_config.kv_transfer_config = core.vllm_config.ec_transfer_config = None
    assert not weight_updates.is_transfer_call("update_weights", core.vllm_config)


NAMES = st.sampled_from([None, "1", "2", "3", "default"])
STEPS = st.one_of(
    st.tuples(st.just("update"), NAMES),
    st.tuples(st.just("start")),
    st.tuples(st.just("chunk")),
    st.tuples(st.just("finish"), NAMES),
    st.tuples(st.just("name"), st.sampled_from(["1", "2", "3", "default"])),
    st.tuples(st.just("compute")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("sleep")),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=14))
def test_weight_transfer_in_any_order_never_shares_mixed_weights(steps: list[Any]) -> None:
    """Whatever is called when: an engine that shares holds KV of its weights alone, and the version that it
    shares as was given after the last of them had come."""
    engine_state.record_engine_start(fresh=True)
    engine_state.current().record_core_start()
    config = engine_config(Path("/none"))
    config.kv_transfer_config.kv_connector_extra_config = dict(TRUST)
    config.weight_transfer_config = None
    core = TransferCore(config)
    core.pool = Pool()
    core.scheduler.kv_cache_manager.block_pool = core.pool
    named: set[str | None] = set()
    for step in steps:
        weights = core.ranks[0].weights
        try:
            match step:
                case ["update", version]:
                    core.update(version)
                    named = {version}
                case ["start"]:
                    core.call("start_weight_update")
                case ["chunk"]:
                    core.call("update_weights", update_info={})
                case ["finish", version]:
                    core.finish(version)
                    named = {version}
                case ["name", version]:
                    core.name(version)
                    named |= {version}
                case ["compute"]:
                    core.pool.cached_block_hash_to_block.append(weights)
                case ["reset"]:
                    core.reset()
                case ["sleep"]:
                    sleep(EngineCore.sleep, core, 2)
                    for rank in core.ranks:
                        rank.weights += 1
        except RuntimeError:
            assert engine_state.current().has_unknown_weights()
        if weights_guard.has_replaced_weights():
            continue
        assert set(core.pool.cached_block_hash_to_block) <= {core.ranks[0].weights}
        assert not core.ranks[0]._weight_update_active
        version = shares_as()
        if version is None:
            assert core.ranks[0].weights == 0
        else:
            assert version in named
            event("shares")
            named = {version}
