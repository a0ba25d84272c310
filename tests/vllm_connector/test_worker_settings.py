"""Settings of workers that do not inherit the engine's environment: Ray starts them with a few variables."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from cornplug.config import Config
from cornplug.engine_common.shared_flags import load_settings
from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.flags import our_settings, transfer_configs
from devkit import checkpoints
from devkit.vllm_cli import parse_serve

NOT_THE_ENGINES: Final = {"qos": True, "encoder": {"admin_key"}}
"""Settings that no worker reads."""
BESIDE: Final = json.dumps({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    plugin.register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("models") / "vl")


def engine_config(model: Path, *flags: str) -> Any:
    args = parse_serve(["--model", str(model), "--max-model-len", "64", "--kv-connector", "cornplug", *flags])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def extras(config: Any) -> list[Any]:
    return [our_settings(config.kv_transfer_config), config.ec_transfer_config.ec_connector_extra_config]


@pytest.fixture
def engine_settings(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The settings of an engine with a file, variables and one flag ("--cornplug-app chat")."""
    (short_path / "conf").mkdir()
    (short_path / "conf" / "cornplug.toml").write_text(
        '[store]\nsecret_file = "secret"\naccess_log = "log"\n'
        "[store.namespaces.chat]\nshare = 0.5\nttl_s = 60\n"
        '[encoder]\nadmin_key = "do not tell"\n[engine]\napp = "of the file"\nsave = "always"\n'
    )
    monkeypatch.chdir(short_path)
    monkeypatch.setenv("CORNPLUG_CONFIG", "conf/cornplug.toml")
    monkeypatch.setenv("CORNPLUG_RUNTIME_DIR", str(short_path / "run"))
    monkeypatch.setenv("CORNPLUG_STORE_FAR", "file:///share,valkey://:password@far:6379/0")
    monkeypatch.setenv("CORNPLUG_STORE_SIZE_BYTES", "64MiB")
    monkeypatch.setenv("CORNPLUG_STORE_DISK_PATH", "disk")
    monkeypatch.setenv("CORNPLUG_ENCODER_ENGINE_URLS", "http://a:8750#3,http://b:8750")
    monkeypatch.setenv("CORNPLUG_ENGINE_PAGE_TOKENS", "128")
    return load_settings({"engine.app": "chat"})


@pytest.mark.parametrize("beside", [[], ["--kv-transfer-config", BESIDE]])
def test_worker_without_environment_has_engine_settings(
    model: Path, engine_settings: Config, monkeypatch: pytest.MonkeyPatch, beside: list[str]
) -> None:
    sent = pickle.dumps(engine_config(model, "--cornplug-app", "chat", *beside))
    for name in [name for name in os.environ if name.startswith(("CORNPLUG_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.chdir("/")
    found = [load_settings(extra) for extra in extras(pickle.loads(sent))]
    wanted = engine_settings.model_dump(exclude=NOT_THE_ENGINES)
    assert [one.model_dump(exclude=NOT_THE_ENGINES) for one in found] == [wanted, wanted]
    assert b"do not tell" not in sent, "a worker needs no key of the service"


def test_config_object_of_two_engines_keeps_its_settings(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, _ = transfer_configs("cornplug", {"engine.app": "chat"})
    for tokens in (128, 256):
        monkeypatch.setenv("CORNPLUG_ENGINE_PAGE_TOKENS", str(tokens))
        args = AsyncEngineArgs(model=str(model), max_model_len=64, kv_transfer_config=kv)
        extra = our_settings(args.create_engine_config().kv_transfer_config)
        assert extra is not None
        assert load_settings(extra).engine.page_tokens == tokens


def test_worker_with_another_environment_has_engine_settings(
    model: Path, engine_settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` ran in a shell with settings of its own."""
    config = engine_config(model, "--cornplug-app", "chat")
    monkeypatch.setenv("CORNPLUG_CONFIG", "/absent.toml")
    monkeypatch.setenv("CORNPLUG_STORE_SOCKET", "/elsewhere")
    monkeypatch.setenv("CORNPLUG_STORE_DISK_SIZE_BYTES", "1GiB")
    monkeypatch.setenv("CORNPLUG_ENGINE_PAGE_TOKENS", "none")
    wanted = engine_settings.model_dump(exclude=NOT_THE_ENGINES)
    assert [load_settings(extra).model_dump(exclude=NOT_THE_ENGINES) for extra in extras(config)] == [
        wanted
    ] * 2


@pytest.mark.more  # its process imports vLLM
@pytest.mark.usefixtures("engine_settings")
def test_worker_process_connects_to_engines_store(model: Path, short_path: Path) -> None:
    config = engine_config(model, "--cornplug-app", "chat")
    (short_path / "sent").write_bytes(pickle.dumps(config))
    code = (
        "import pickle, sys\n"
        "from cornplug.vllm_connector import plugin; plugin.register()\n"
        "from cornplug.vllm_connector.runtime import get_runtime\n"
        "config = pickle.load(open(sys.argv[1], 'rb'))\n"
        "kv = get_runtime(config.kv_transfer_config.kv_connector_extra_config)\n"
        "ec = get_runtime(config.ec_transfer_config.ec_connector_extra_config)\n"
        "print(kv is ec, kv.config.store.socket, kv.app)\n"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", code, str(short_path / "sent")],
        capture_output=True, text=True, env=env, cwd="/", timeout=300, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == f"True {load_settings(extras(config)[0]).store.socket} chat"
