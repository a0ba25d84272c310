"""A server whose weights a trainer replaced shares under the trainer's version, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sglang.srt import runtime_context
from sglang.srt.arg_groups import overrides
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import InitialModel
from cornplug.identity import placeholder_tokens as values_of
from cornplug.sglang_hooks import weight_epochs
from cornplug.sglang_hooks.media import placeholder_tokens
from cornplug.sglang_hooks.model import model_config, weight_updates
from devkit import checkpoints

from .hooked import hook_of
from .test_disk_updates import described

scheduler_releases = hook_of(weight_epochs, "SchedulerWeightUpdaterManager.release_memory_occupation")
note_release = hook_of(weight_updates, "SchedulerWeightUpdaterManager.release_memory_occupation")
update_from_disk = hook_of(weight_epochs, "SchedulerWeightUpdaterManager.update_weights_from_disk")
make_flush_wrapper = hook_of(weight_epochs, "SchedulerFlushWrapper.__init__")
update_weight_version = hook_of(weight_epochs, "Scheduler.handle_update_weight_version")


class Runner:
    """SGLang's loader of one model's tensors."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.weight_updater = self

    def begin_weight_update(self) -> None:
        assert weights_guard.has_replaced_weights(), "no process shares meanwhile"

    def end_weight_update(self, run_post_load: bool) -> None:
        pass

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any) -> tuple[bool, str]:
        assert weights_guard.has_replaced_weights(), "no process shares meanwhile"
        self.server.weights += 1
        return self.server.loads, ""

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return self.update_weights_from_tensor(None, None)


class Server:
    """The first rank of a server: SGLang's own manager of updates, and cornplug's hooks around it."""

    def __init__(self) -> None:
        self.version, self.weights, self.loads = "default", 0, True
        self.forward_ct, self.idle, self.cached = 0, True, set[int]()
        self.other_rank: Callable[[list[int]], list[int]] = lambda vote: vote
        self.settings: dict[str, Any] = dict.fromkeys(("quantization", "language_only", "encoder_urls"), None)
        self.settings |= dict.fromkeys(("dp_size", "pp_size", "nnodes"), 1)
        self.settings |= {"enable_adaptive_dispatch_to_encoder": False}
        self.settings |= {"enable_memory_saver": True, "enable_weights_cpu_backup": False}
        manager: Any = object.__new__(SchedulerWeightUpdaterManager)
        manager.tp_worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", Runner(self))], deserialize_own_rank=lambda tensors: {}
        )
        manager.draft_worker = manager.metrics_collector = manager._session = manager.tp_cpu_group = None
        manager.scheduler, manager.flush_cache = self, self.flush_cache
        self.weight_updater = manager
        self.flushes: Any = object.__new__(SchedulerFlushWrapper)
        args, kwargs = make_flush_wrapper(
            self.flushes, flush_cache=self.flush_cache, is_fully_idle=lambda: self.idle, send_output=print
        )
        # SGLang's own functions: an earlier test of this process may have installed the hooks.
        inspect.unwrap(SchedulerFlushWrapper.__init__)(*args, **kwargs)

    def record_weight_version_change(self, new_version: str | None) -> None:
        self.version = self.version if new_version is None else new_version

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """SGLang's flush."""
        if self.idle:
            self.cached.clear()
        return self.idle

    def flush(self) -> bool:
        """`/flush_cache`"""
        output = self.flushes.handle(io_struct.FlushCacheReqInput())
        return bool(output is not None and output.success)

    def compute(self) -> None:
        """A request, whose KV stays in the cache."""
        self.forward_ct += 1
        self.cached.add(self.weights)

    def call(self, name: str, request: Any) -> Any:
        """As SGLang calls its manager with the hooks of both modules in place."""
        function: Any = inspect.unwrap(getattr(SchedulerWeightUpdaterManager, name))
        for hook in (*weight_epochs.TRAINER_HOOKS, *weight_updates.HOOKS):
            if hook.target.endswith(f"SchedulerWeightUpdaterManager.{name}"):
                if hook.kind == "before":
                    hook.function(self.weight_updater, request)
                else:
                    function = partial(hook.function, function)
        return function(self.weight_updater, request)

    def begin(self, selector: Any = "all") -> None:
        self.call("begin_weight_update", io_struct.BeginWeightUpdateReqInput(selector=selector))

    def bucket(self, version: str | None = None, *, flush: bool = True) -> None:
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[], weight_version=version, flush_cache=flush
        )
        self.call("update_weights_from_tensor", request)

    def end(self) -> None:
        self.call("end_weight_update", io_struct.EndWeightUpdateReqInput())

    def update(self, *versions: str | None, flush: bool = True) -> None:
        """A session with one bucket of tensors for each of these."""
        self.begin()
        for version in versions:
            self.bucket(version, flush=flush)
        self.end()

    def update_by_ipc(self, version: str | None = None) -> None:
        request = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}, weight_version=version)
        self.call("update_weights_from_ipc", request)

    def name(self, version: str) -> None:
        """`/update_weight_version`"""

        def original(_: Any, recv_req: Any) -> None:
            self.record_weight_version_change(recv_req.new_version)

        update_weight_version(original, self, io_struct.UpdateWeightVersionReqInput(new_version=version))


def shares_as() -> str | None:
    """The version that this engine shares as; None where it shares nothing."""
    source = engine_state.current().source()
    return None if source is None else source.version


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("CORNPLUG_SGLANG", '{"engine.trust_weight_version": "true"}')
    return made(monkeypatch)


def made(patch: pytest.MonkeyPatch) -> Server:
    """A server before its first update."""
    server = Server()
    engine_state.current().mark_weights_unknown(False)
    patch.setattr(weight_epochs, "_rank", type(weight_epochs._rank)())
    patch.setattr(weight_epochs, "_trained", set())
    model = SimpleNamespace(hf_config=SimpleNamespace())
    patch.setattr(runtime_context, "get_server_args", lambda: None)
    patch.setattr(runtime_context, "get_serving", lambda: SimpleNamespace(weight_version=server.version))
    patch.setattr(overrides, "resolved_view", lambda _: SimpleNamespace(**server.settings))
    patch.setattr(overrides, "model_config_of", lambda _: model)

    def all_reduce(vote: torch.Tensor, **_: Any) -> None:
        other = torch.tensor(server.other_rank(vote.tolist()), dtype=torch.int64)
        vote.copy_(torch.minimum(vote, other))

    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    patch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
    patch.setattr(torch.distributed, "get_rank", lambda group: 0)
    return server


def test_trainer_update_names_weights_and_the_first_ones_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoints.qwen2_vl(tmp_path / "old")
    monkeypatch.setattr(model_config, "_started", InitialModel())
    monkeypatch.setattr(model_config, "_describe_running", lambda: described(old))

    def names() -> tuple[bytes, bytes]:
        model = model_config.engine_model()
        return model.kv_identity()[0], model.tower_identity().identity

    found = [names()]
    for version in ("run/1", "run/2", "run/1"):
        server.update(version)
        assert shares_as() == version
        found.append(names())
    assert found[1] == found[3]
    assert len({part for pair in found for part in pair}) == 6
    assert weights_guard.epoch() == 6


@pytest.mark.parametrize("versions", [("7", "7", "7"), (None, None, "7"), ("7", None, None)])
def test_trainer_update_in_buckets_is_named_once_at_its_end(
    versions: tuple[str | None, ...], server: Server
) -> None:
    server.begin()
    for version in versions:
        server.bucket(version)
        assert shares_as() is None
        assert weights_guard.has_replaced_weights()
    server.end()
    assert (shares_as(), weights_guard.epoch()) == ("7", 2)


def test_trainer_update_by_ipc_is_named_by_its_one_call(server: Server) -> None:
    server.update_by_ipc("7")
    assert shares_as() == "7"


def test_trainer_update_forgets_media(server: Server) -> None:
    placeholder_tokens.remember_identity(b"i" * 32)
    server.update("7")
    assert not any(map(placeholder_tokens.is_keyed, values_of(b"i" * 32)))


@pytest.mark.parametrize("versions", [(None,), ("",), ("default",), ("7", "8"), ("v" * 1025,)])
def test_trainer_update_without_a_name_is_off_until_one_comes(
    versions: tuple[str | None, ...], server: Server
) -> None:
    server.update(*versions)
    assert weights_guard.has_replaced_weights()
    assert not engine_state.current().has_unknown_weights()
    server.update("9")
    assert shares_as() == "9"


def test_trainer_update_with_the_version_before_it_is_off_until_another_comes(server: Server) -> None:
    server.update("7")
    server.update("7")
    assert weights_guard.has_replaced_weights()
    server.update("7")
    assert weights_guard.has_replaced_weights()
    server.update("8")
    assert shares_as() == "8"


def test_trainer_update_named_after_its_end_shares(server: Server) -> None:
    server.update(None)
    server.name("7")
    assert shares_as() == "7"
    server.name("8")
    assert shares_as() == "7", "the weights are the same"


def test_trainer_update_named_within_is_named_at_its_end(server: Server) -> None:
    server.begin()
    server.name("7")
    server.bucket()
    assert shares_as() is None
    server.end()
    assert shares_as() == "7"


def test_trainer_update_beside_kv_of_old_weights_waits_for_a_flush(server: Server) -> None:
    server.compute()
    server.update("7", flush=False)
    assert weights_guard.has_replaced_weights()
    server.idle = False
    assert not server.flush()
    assert weights_guard.has_replaced_weights()
    server.idle = True
    assert server.flush()
    assert (shares_as(), server.cached) == ("7", set())


def test_trainer_update_after_a_flush_before_it_is_flushed_once_more(server: Server) -> None:
    """As trainers do that pause and flush first."""
    server.compute()
    server.flush()
    server.update("7", flush=False)
    assert shares_as() == "7"


def test_trainer_update_with_a_request_in_its_midst_waits_for_a_flush(server: Server) -> None:
    server.begin()
    server.bucket("7")
    server.compute()
    server.end()
    assert weights_guard.has_replaced_weights()
    server.flush()
    assert shares_as() == "7"


def test_trainer_update_that_waits_is_over_once_the_weights_are_released(server: Server) -> None:
    server.compute()
    server.update("7", flush=False)
    request = io_struct.ReleaseMemoryOccupationReqInput(tags=["weights"])
    scheduler_releases(None, request)
    server.flush()
    server.name("8")
    assert weights_guard.has_replaced_weights()


def test_trainer_update_after_a_release_of_the_weights_shares(server: Server) -> None:
    note_release(None, io_struct.ReleaseMemoryOccupationReqInput(tags=["weights"]))
    assert weights_guard.has_replaced_weights()
    server.update("7")
    assert shares_as() == "7"


def refuses(server: Server) -> None:
    server.loads = False


LOST: dict[str, Callable[[Server], Any]] = {
    "failed": refuses,
    "draft": lambda server: setattr(server.weight_updater, "draft_worker", SimpleNamespace(
        weight_update_runners=list, clear_cache_pool=lambda: None
    )),
    "replicas": lambda server: server.settings.update(dp_size=2),
    "pipeline": lambda server: server.settings.update(pp_size=2),
    "quantised": lambda server: server.settings.update(quantization="fp8"),
    "encoders": lambda server: server.settings.update(encoder_urls=["http://x"]),
    "one rank votes no": lambda server: setattr(server, "other_rank", lambda vote: [0, *vote[1:]]),
    "another version on one rank": lambda server: setattr(
        server, "other_rank", lambda vote: [*vote[:3], vote[3] + 1, vote[4] - 1]
    ),
    "unknown before": lambda server: engine_state.current().mark_weights_unknown(),
}  # fmt: skip


@pytest.mark.parametrize("what", LOST)
def test_trainer_update_that_cannot_be_followed_ends_sharing(what: str, server: Server) -> None:
    LOST[what](server)
    server.update("7")
    assert engine_state.current().has_unknown_weights()
    server.loads, server.weight_updater.draft_worker = True, None
    server.other_rank = lambda vote: vote
    server.update("8")
    assert weights_guard.has_replaced_weights()


def test_trainer_update_that_raised_ends_sharing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Runner, "update_weights_from_tensor", broken)
    with pytest.raises(RuntimeError, match="memory"):
        server.update("7")
    assert engine_state.current().has_unknown_weights()


def test_trainer_update_of_a_draft_alone_keeps_sharing(server: Server) -> None:
    server.begin(selector="draft")
    server.end()
    assert not weights_guard.has_replaced_weights()


def test_trainer_update_where_versions_are_not_trusted_ends_sharing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORNPLUG_SGLANG", "{}")
    server.update("7")
    assert engine_state.current().has_unknown_weights()
    server.update_by_ipc("8")
    server.name("9")
    assert weights_guard.has_replaced_weights()


def test_trainer_update_before_a_disk_update_ends_sharing(server: Server, tmp_path: Path) -> None:
    """Tensors that no folder holds would stay."""
    server.update("7")
    request = io_struct.UpdateWeightFromDiskReqInput(model_path=str(tmp_path), load_format="auto")
    result = SimpleNamespace(success=True)
    update_from_disk(lambda *_: result, server.weight_updater, request)
    assert engine_state.current().has_unknown_weights()


NAMES = st.sampled_from([None, "1", "2", "3", "default"])
STEPS = st.one_of(
    st.tuples(st.just("update"), st.lists(NAMES, max_size=3), st.booleans()),
    st.tuples(st.just("begin")),
    st.tuples(st.just("bucket"), NAMES),
    st.tuples(st.just("end")),
    st.tuples(st.just("ipc"), NAMES),
    st.tuples(st.just("name"), st.sampled_from(["1", "2", "3", "default"])),
    st.tuples(st.just("compute")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("busy")),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=14))
def test_trainer_update_in_any_order_never_shares_mixed_weights(steps: list[Any]) -> None:
    """Whatever is called when: an engine that shares holds KV of its weights alone, and the version that it
    shares as was given for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORNPLUG_SGLANG", '{"engine.trust_weight_version": "true"}')
        server = made(patch)
        since: set[str | None] = set()
        for step in steps:
            weights = server.weights
            match step:
                case ["update", versions, flush]:
                    since = set()
                    if server.weight_updater._session is None:
                        server.update(*versions, flush=flush)
                        since = set(versions)
                case ["begin"]:
                    since = set()
                    server.begin()
                case ["bucket", version]:
                    since |= {version}
                    server.bucket(version)
                case ["end"]:
                    server.end()
                case ["ipc", version]:
                    since = {version} if server.weight_updater._session is None else since | {version}
                    server.update_by_ipc(version)
                case ["name", version]:
                    since |= {version}
                    server.name(version)
                case ["compute"]:
                    server.compute()
                case ["flush"]:
                    server.idle = True
                    server.flush()
                case ["busy"]:
                    server.idle = False
            if weights_guard.has_replaced_weights():
                continue
            assert server.cached <= {server.weights}
            assert server.weight_updater._session is None
            version = shares_as()
            if version is None:
                assert server.weights == 0
            elif weights != server.weights:
                assert version in since
                event("shares")
        engine_state.current().mark_weights_unknown(False)
