"""Registration, wrapping, replaced weights, adapters, and metrics on vLLM's own path."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import prometheus_client
import pytest
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorProm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore

from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.lora_digests import LoraDigests
from cornplug.errors import CheckpointError
from cornplug.metrics import METRICS, Tally
from cornplug.vllm_connector import compat, plugin, stats
from cornplug.vllm_connector.ec_connector import CornplugECConnector
from cornplug.vllm_connector.kv_connector import CornplugConnector
from cornplug.vllm_connector.model import weight_updates

# -- register ---------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nobody has registered yet."""
    monkeypatch.setattr(plugin, "_state", {"registered": False})


def test_register_repeated_wraps_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    assert plugin.is_registered()
    assert plugin.disabled_reason() == ""
    once = EngineArgs.__dict__["from_cli_args"]
    plugin.register()
    monkeypatch.setattr(plugin, "_state", {"registered": False})
    plugin.register()
    assert EngineArgs.__dict__["from_cli_args"] is once
    assert isinstance(once, classmethod)
    assert KVConnectorFactory._registry["CornplugConnector"]() is CornplugConnector
    assert ECConnectorFactory._registry["CornplugECConnector"]() is CornplugECConnector


@pytest.mark.parametrize("version", ["0.34.0", "0.31.2", "1.0.0", "0.99rc1", "dev", "", None])
def test_register_in_untested_vllm_logs_one_line(
    fresh: None, version: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        mock.patch.object(VersionRange, "installed_version", return_value=version),
        caplog.at_level(logging.DEBUG, "vllm.cornplug"),
    ):
        logging.getLogger("vllm.cornplug").addHandler(caplog.handler)
        plugin.register()
        logging.getLogger("vllm.cornplug").removeHandler(caplog.handler)
    assert not plugin.is_registered()
    assert "outside the tested range >=0.32,<0.34" in plugin.disabled_reason()
    assert len({r.message for r in caplog.records}) == 1


@pytest.fixture
def unregistered(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own argument parsing, as before anybody registered."""
    for name in ("add_cli_args", "from_cli_args", "create_engine_config"):
        raw = EngineArgs.__dict__[name]
        function = getattr(raw, "__func__", raw)
        plain = getattr(function, compat._ORIGINAL_ATTRIBUTE, function)
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else (lambda found: found)
        monkeypatch.setattr(EngineArgs, name, kind(plain))


def configured(*args: str) -> Any:
    """The (KV, EC) configuration that vLLM's own code gets from a command line."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    made = EngineArgs.from_cli_args(parser.parse_args(["--model", str(Path(__file__).parent), *args]))
    seen: list[Any] = []
    function = EngineArgs.create_engine_config

    class Stop(Exception):
        pass

    def stop(self: EngineArgs, *rest: Any, **kwargs: Any) -> Any:
        seen.append((self.kv_transfer_config, self.ec_transfer_config))
        raise Stop

    # The last thing that ours calls is vLLM's own function.
    cell = next(c for c in function.__closure__ if c.cell_contents is function._cornplug_original)  # type: ignore[union-attr, attr-defined]
    plain, cell.cell_contents = cell.cell_contents, stop
    try:
        made.create_engine_config()
    except Stop:
        pass
    finally:
        cell.cell_contents = plain
    return seen[0]


OURS = {"kv_connector": "CornplugConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
BOTH = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, OURS]},
}


@pytest.mark.parametrize("fault", ["version", "method"])
@pytest.mark.parametrize(
    ("line", "left"),
    [
        (["--kv-connector", "cornplug", "--cornplug-store-size", "64GiB", "--cornplug-app", "a"], None),
        (["--cornplug-app", "a"], None),
        (["--kv-transfer-config", json.dumps(OURS)], None),
        (["--kv-transfer-config", json.dumps(BOTH)], "MultiConnector"),
        (["--kv-connector", "cornplug", "--kv-transfer-config", json.dumps(NIXL)], "NixlConnector"),
        (["--kv-connector", "NixlConnector"], "NixlConnector"),
    ],
)
def test_register_in_untested_vllm_runs_it_as_stock(
    unregistered: None, caplog: pytest.LogCaptureFixture, line: list[str], left: str | None, fault: str
) -> None:
    """The command line of an upgraded image starts the engine, and the log says why nothing is shared."""
    version = mock.patch.object(VersionRange, "installed_version", return_value="0.34.0")
    lacking = mock.patch.object(
        plugin, "_all_wrappers", return_value=[("vllm.engine.arg_utils", "Gone.f", repr)]
    )
    logging.getLogger("vllm.cornplug").addHandler(caplog.handler)
    try:
        with version if fault == "version" else lacking:
            plugin.register()
        kv, ec = configured(*line)
    finally:
        logging.getLogger("vllm.cornplug").removeHandler(caplog.handler)
    assert ec is None
    assert (kv.kv_connector if kv else None) == left
    assert "CornplugConnector" not in str(kv)
    assert ("runs as stock vLLM: " in caplog.text) is (line != ["--kv-connector", "NixlConnector"])


def test_register_with_missing_method_gives_reason(fresh: None) -> None:
    with mock.patch.object(compat, "wrap", side_effect=AttributeError("no such method")):
        plugin.register()
    assert not plugin.is_registered()
    assert "no such method" in plugin.disabled_reason()


def test_vllm_installed_version_is_supported() -> None:
    assert compat.SUPPORTED_VERSIONS.explain_mismatch() == ""


# -- wrap -------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Iterator[ModuleType]:
    module = ModuleType("cornplug_test_target")

    class Base:
        def inherited(self) -> str:
            return "base"

    class Thing(Base):
        def plain(self, x: int) -> int:
            """What it says."""
            return x

        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        def of_class(cls, x: int) -> tuple[str, int]:
            return cls.__name__, x

    def function(x: int) -> int:
        return x

    module.Thing, module.Base, module.function = Thing, Base, function  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_wrap_keeps_method_kind_and_wraps_once(target: Any) -> None:
    calls: list[str] = []

    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    for _ in range(3):
        for name in ("Thing.plain", "Thing.static", "Thing.of_class", "Thing.inherited", "function"):
            compat.wrap(target.__name__, name, wrapper)
    thing = target.Thing()
    assert thing.plain(1) == 1
    assert thing.plain(x=2) == 2
    assert (thing.static(3), target.Thing.static(4)) == (3, 4)
    assert thing.of_class(5) == target.Thing.of_class(5) == ("Thing", 5)
    assert thing.inherited() == "base"
    assert target.function(6) == 6
    assert len(calls) == 8, "each call goes through the wrapper once"
    assert target.Thing.plain.__doc__ == "What it says."
    assert target.Base().inherited() == "base"
    assert len(calls) == 8, "the base class is as it was"


@pytest.mark.parametrize("name", ["Thing.missing", "Nothing.plain", "missing"])
def test_wrap_missing_target_raises(target: Any, name: str) -> None:
    with pytest.raises(AttributeError):
        compat.wrap(target.__name__, name, lambda original: None)
    with pytest.raises(ImportError):
        compat.wrap("cornplug_no_such_module", name, lambda original: None)


# -- weights ----------------------------------------------------------------------------------


class Core(EngineCore):
    """An engine core with nothing in it."""

    def __init__(self, *, started: bool = True) -> None:
        self.calls: list[Any] = []
        self.vllm_config: Any = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
        executor = SimpleNamespace(
            collective_rpc=lambda *a: self.calls.append(a), sleep=lambda level: self.calls.append(level)
        )
        self.model_executor: Any = executor
        self.pause_scheduler = lambda **kwargs: None  # type: ignore[method-assign, assignment]
        if started:
            self.scheduler: Any = object()


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    plugin.register()


@pytest.mark.parametrize(
    "method",
    [
        "update_weights", "start_weight_update", "load_model", "apply_model",
        "reset_weights", "update_weights_from_distributed", "my_trainer_step", lambda worker: None,
    ],
)  # fmt: skip
def test_collective_rpc_other_call_ends_sharing(method: Any) -> None:
    core = Core()
    core.collective_rpc(method, None, (1,))
    assert core.calls == [(method, None, (1,), None)]
    assert weights_guard.has_replaced_weights()


@pytest.mark.parametrize("method", ["add_lora", "profile", "synchronize_device", "reset_mm_cache", "wake_up"])
def test_collective_rpc_harmless_call_keeps_sharing(method: str) -> None:
    Core().collective_rpc(method)
    assert not weights_guard.has_replaced_weights()


def test_collective_rpc_at_start_keeps_sharing() -> None:
    Core(started=False).collective_rpc("load_model")
    assert not weights_guard.has_replaced_weights()


@pytest.mark.parametrize(("args", "ends"), [((), False), ((1,), False), ((2,), True), ((3,), True)])
def test_sleep_discarding_weights_ends_sharing(args: tuple[int, ...], ends: bool) -> None:
    Core().sleep(*args)
    assert weights_guard.has_replaced_weights() is ends
    engine_state.current().mark_weights_unknown(False)
    Core().sleep(level=args[0] if args else 1)
    assert weights_guard.has_replaced_weights() is ends


def test_weight_updates_harmless_names_exist_in_vllm() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    unknown = [name for name in weight_updates._HARMLESS if not hasattr(Worker, name)]
    assert unknown == []


# -- adapters ---------------------------------------------------------------------------------


def test_lora_digests_follow_adapter_content(tmp_path: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(data)
    adapters = LoraDigests()
    a, b, c = (adapters.digest(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"3")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            adapters.digest(str(tmp_path / "a"))
        assert error.value.reason == "lora_changed"
    (tmp_path / "b" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError) as error:
        adapters.digest(str(tmp_path / "b"))
    assert error.value.reason == "lora"


# -- metrics ----------------------------------------------------------------------------------


def tallied() -> Tally:
    tally = Tally()
    tally.count("cornplug_hits_total", "chat", "kv_page", "store", amount=3)
    tally.count("cornplug_misses_total", "chat", "embedding", "evicted")
    tally.count("cornplug_bytes_total", "chat", "kv_page", "load", amount=1000)
    tally.count("cornplug_saves_total", "chat", "kv_page", "stored")
    tally.count("cornplug_saved_tokens_total", "chat", amount=128)
    tally.count("cornplug_saved_tower_passes_total", "chat")
    tally.observe("cornplug_wait_seconds", 0.004, "chat", "kv_page")
    tally.observe("cornplug_wait_seconds", 0.2, "chat", "kv_page")
    return tally


def test_stats_of_both_connectors_share_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(stats, "_collectors", {})

    def own(kind: Any) -> Any:
        return lambda **kwargs: kind(registry=registry, **kwargs)

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="CornplugConnector", kv_connector_module_path=None),
        ec_transfer_config=SimpleNamespace(ec_connector="CornplugECConnector", ec_connector_module_path=None),
    )
    counter, histogram = own(prometheus_client.Counter), own(prometheus_client.Histogram)
    labels = {0: ["model", "0"], 1: ["model", "1"]}
    for prom in (KVConnectorProm, ECConnectorProm):
        monkeypatch.setattr(prom, "_counter_cls", staticmethod(counter))
        monkeypatch.setattr(prom, "_histogram_cls", staticmethod(histogram))
    kv = KVConnectorProm(config, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    ec = ECConnectorProm(config, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    kv_stats, ec_stats = stats.drain_kv(tallied()), stats.drain_ec(tallied())
    assert kv_stats is not None
    assert ec_stats is not None
    kv.observe(kv_stats.data, 0)
    ec.observe(ec_stats.data, 0)
    ec.observe(ec_stats.data, 1)
    text = prometheus_client.generate_latest(registry).decode()
    hits = 'cornplug_hits_total{app="chat",engine="%d",kind="kv_page",model_name="model",source="store"} %s'
    assert hits % (0, 6.0) in text
    assert hits % (1, 3.0) in text
    assert 'cornplug_saved_tokens_total{app="chat",engine="0",model_name="model"} 256.0' in text
    assert 'cornplug_wait_seconds_count{app="chat",engine="0",kind="kv_page",model_name="model"} 4.0' in text
    assert 'cornplug_wait_seconds_bucket{app="chat",engine="0",kind="kv_page",le="0.005"' in text
    for name in METRICS:
        assert f"# HELP {name.removesuffix('_total')}" in text


def test_stats_aggregate_adds_and_reset_empties() -> None:
    first, second = stats.drain_kv(tallied()), stats.drain_kv(tallied())
    assert first is not None
    assert second is not None
    total = CornplugConnector.build_kv_connector_stats()
    assert total is not None
    assert total.is_empty()
    assert total.aggregate(first).aggregate(second) is total
    assert total.reduce() == {
        "hits{kv_page,store}": 6,
        "misses{embedding,evicted}": 2,
        "bytes{kv_page,load}": 2000,
        "saves{kv_page,stored}": 2,
        "saved_tokens{}": 256,
        "saved_tower_passes{}": 2,
    }
    assert first.reduce()["hits{kv_page,store}"] == 3, "what was added is as it was"
    total.reset()
    assert total.is_empty()
    assert stats.drain_kv(Tally()) is None
    assert stats.drain_ec(Tally()) is None
    assert CornplugECConnector.build_ec_connector_stats({}) is not None


def test_stats_appear_in_log_line_of_vllm() -> None:
    config = SimpleNamespace(
        kv_connector="CornplugConnector", kv_connector_module_path=None, is_kv_transfer_instance=True
    )
    log = KVConnectorLogging(config)  # type: ignore[arg-type]
    found = stats.drain_kv(tallied())
    assert found is not None
    log.observe(found.data)
    lines: list[str] = []
    log.log(lambda *args: lines.append(args[0] % args[1:]))
    assert any("hits{kv_page,store}" in line for line in lines)
