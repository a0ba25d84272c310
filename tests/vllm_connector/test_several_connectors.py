"""`--kv-connector cornplug` beside another connector's flags: what vLLM is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import AsyncEngineArgs

from cornplug.config import EMBEDDINGS_BY_VALUE
from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.flags import add_offloading, has_ours, our_settings
from devkit import checkpoints
from devkit.vllm_cli import parse_serve

NIXL: Final = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_producer",
    "engine_id": "p0",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"backends": ["UCX"]},
}
OURS: Final = ("--kv-connector", "cornplug", "--cornplug-app", "chat")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    plugin.register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "t")


def configured(model: Path, *flags: str) -> Any:
    args = parse_serve(["--model", str(model), "--max-model-len", "64", *flags])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def names(kv: Any) -> list[str]:
    assert kv.kv_connector == "MultiConnector"
    return [child["kv_connector"] for child in kv.kv_connector_extra_config["connectors"]]


def test_flags_transfer_config_beside_cornplug_is_first_of_two(model: Path) -> None:
    config = configured(model, *OURS, "--kv-transfer-config", json.dumps(NIXL))
    kv = config.kv_transfer_config
    assert names(kv) == ["NixlConnector", "CornplugConnector"]
    assert (kv.kv_role, kv.kv_load_failure_policy, kv.engine_id) == ("kv_both", "recompute", "p0")
    theirs, ours = [child for _, child in MultiConnector._get_connector_classes_and_configs(config)]
    for name, value in NIXL.items():
        assert getattr(theirs.kv_transfer_config, name) == value
    assert ours.kv_transfer_config.kv_connector_extra_config["engine.app"] == "chat"
    assert ours.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_flags_transfer_config_of_several_gets_cornplug_behind_them(model: Path) -> None:
    extra = {"cpu_bytes_to_use": 1 << 20}
    children = [
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    ]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    kv = configured(model, *OURS, "--kv-transfer-config", json.dumps(several)).kv_transfer_config
    assert names(kv) == ["OffloadingConnector", "ExampleConnector", "CornplugConnector"]
    assert kv.kv_connector_extra_config["connectors"][0] == children[0]


def test_flags_offloading_size_beside_cornplug_is_first_of_two(model: Path) -> None:
    """vLLM itself would put the offloading connector in cornplug's place."""
    size = ("--kv-offloading-size", "0.5")
    config = configured(model, *OURS, *size)
    assert names(config.kv_transfer_config) == ["OffloadingConnector", "CornplugConnector"]
    assert config.cache_config.kv_offloading_size is None
    first = config.kv_transfer_config.kv_connector_extra_config["connectors"][0]
    stock = configured(model, *size).kv_transfer_config
    assert first["kv_connector"] == stock.kv_connector
    assert first["kv_connector_extra_config"] == stock.kv_connector_extra_config


@pytest.mark.parametrize(
    ("backend", "variable", "connector"),
    [("native", "1", "SimpleCPUOffloadConnector"), ("lmcache", "0", "LMCacheMPConnector")],
)
def test_with_offloading_other_backend_is_its_connector(
    backend: str, variable: str, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", variable)
    ours = KVTransferConfig(kv_connector="CornplugConnector", kv_role="kv_both")
    assert names(add_offloading(ours, 1, backend)) == [connector, "CornplugConnector"]


def test_flags_offloading_size_beside_several_is_first(model: Path) -> None:
    size = ("--kv-offloading-size", "0.5")
    kv = configured(model, *OURS, "--kv-transfer-config", json.dumps(NIXL), *size).kv_transfer_config
    assert names(kv) == ["OffloadingConnector", "NixlConnector", "CornplugConnector"]


def test_flags_transfer_config_without_connector_leaves_cornplug_alone(model: Path) -> None:
    kv = configured(model, *OURS, "--kv-transfer-config", "{}").kv_transfer_config
    assert kv.kv_connector == "CornplugConnector"


def test_engine_by_value_is_noted_in_settings_of_one_among_several(model: Path) -> None:
    kv = configured(
        model, *OURS, "--enable-mm-embeds", "--kv-transfer-config", json.dumps(NIXL)
    ).kv_transfer_config
    ours = our_settings(kv)
    assert ours is not None
    assert (ours["engine.app"], ours[EMBEDDINGS_BY_VALUE]) == ("chat", True)


def test_has_ours_without_cornplug_is_false() -> None:
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert not has_ours(other)
    assert not has_ours(None)
