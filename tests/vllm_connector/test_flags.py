"""Our flags through vLLM's own parser, and what they make of vLLM's own configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from expected_errors import expect_error
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.vllm_connector import flags, plugin
from cornplug.vllm_connector import runtime as runtime_module
from devkit.checkpoints import qwen2_text, qwen2_vl

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm_flags.json"

ALL = [
    "--kv-connector", "cornplug", "--cornplug-app", "chat", "--cornplug-store", "/run/s.sock",
    "--cornplug-store-size", "1073741824", "--cornplug-encoder", "/run/e.sock",
    "--cornplug-store-deadline", "0.2", "--cornplug-encoder-deadline", "3", "--cornplug-page-tokens", "128",
    "--cornplug-save", "second", "--cornplug-store-disk", "/nvme/store",
    "--cornplug-store-far", "file:///share,valkey://far:6379/0",
    "--cornplug-trust-weight-version", "true", "--cornplug-tower", "engine",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    plugin.register()


def parse(*args: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # A folder that is there: without a network vLLM looks for anything else in the hub's cache.
    return parser.parse_args(["--model", str(Path(__file__).parent), *args])


def engine_args(*args: str) -> AsyncEngineArgs:
    return AsyncEngineArgs.from_cli_args(parse(*args))


def produced(*args: str) -> dict[str, Any]:
    """What vLLM is told, as plain JSON."""
    made = engine_args(*args)
    kv, ec = made.kv_transfer_config, made.ec_transfer_config
    found: dict[str, Any] = {"kv": None, "ec": None}
    if kv is not None:
        found["kv"] = {
            name: getattr(kv, name)
            for name in ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")
        }
    if ec is not None:
        found["ec"] = {
            name: getattr(ec, name) for name in ("ec_connector", "ec_role", "ec_connector_extra_config")
        }
    return found


def test_kv_connector_flag_sets_both_configs() -> None:
    made = engine_args("--kv-connector", "cornplug")
    assert made.kv_transfer_config is not None
    assert made.kv_transfer_config.kv_connector == "CornplugConnector"
    assert made.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert made.ec_transfer_config is not None
    assert made.ec_transfer_config.ec_connector == "CornplugECConnector"
    assert made.ec_transfer_config.is_ec_producer
    assert made.ec_transfer_config.is_ec_consumer


def test_flags_configs_equal_golden_file() -> None:
    found = {
        "none": produced(),
        "cornplug": produced("--kv-connector", "cornplug"),
        "all": produced(*ALL),
        "another": produced("--kv-connector", "ExampleConnector"),
    }
    assert found == json.loads(GOLDEN.read_text())


def test_flags_all_reach_their_settings() -> None:
    extra = produced(*ALL)["kv"]["kv_connector_extra_config"]
    config = load_settings(extra)
    assert set(extra) == {setting for setting, _ in flags.SHARED_FLAGS.values()}
    assert config.engine.app == "chat"
    assert config.store.socket == Path("/run/s.sock")
    assert config.store.size_bytes == 1 << 30
    assert config.encoder.socket == Path("/run/e.sock")
    assert (config.store.deadline_s, config.encoder.deadline_s) == (0.2, 3.0)
    assert (config.engine.page_tokens, config.engine.save) == (128, "second")
    assert config.engine.trust_weight_version is True
    assert config.engine.tower == "engine"
    assert config.store.far == ("file:///share", "valkey://far:6379/0")


def test_kv_connector_unknown_name_is_argparse_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--kv-connector", "cornplugg")
    assert end.value.code == 2
    assert "invalid choice: 'cornplugg'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cornplug-app", "x"], r"need --kv-connector cornplug"),
        (
            [
                "--kv-connector",
                "cornplug",
                "--kv-transfer-config",
                '{"kv_connector": "CornplugConnector", "kv_role": "kv_both"}',
            ],
            r"are mutually exclusive",
        ),
        (
            [
                "--kv-connector",
                "ExampleConnector",
                "--kv-transfer-config",
                '{"kv_connector": "X", "kv_role": "kv_both"}',
            ],
            r"are mutually exclusive",
        ),
        (
            [
                "--kv-connector",
                "cornplug",
                "--ec-transfer-config",
                '{"ec_connector": "X", "ec_role": "ec_both"}',
            ],
            r"sets --ec-transfer-config itself",
        ),
    ],
)
def test_flags_in_conflict_error_names_both(args: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_args(*args)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--cornplug-app", "no spaces please"], "engine.app"),
        (["--cornplug-page-tokens", "17"], "engine.page_tokens"),
        (["--cornplug-page-tokens", "many"], "engine.page_tokens"),
        (["--cornplug-store-size", "-1"], "store.size_bytes"),
        (["--cornplug-store-deadline", "0"], "store.deadline_s"),
        (["--cornplug-encoder-deadline", "soon"], "encoder.deadline_s"),
        (["--cornplug-tower", "none"], "engine.tower"),
    ],
)
def test_flags_wrong_value_error_names_field(args: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_args("--kv-connector", "cornplug", *args)
    assert error.value.field == field
    assert field in str(error.value)


@pytest.mark.parametrize("extra", [{"app": "x"}, {"engine.apps": "x"}, {"motor.app": "x"}])
def test_settings_unknown_key_error_names_it(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(extra)
    assert error.value.field == next(iter(extra))


def test_flags_namespace_read_twice_gives_equal_configs() -> None:
    """`vllm serve` makes its engine arguments once for checks and once to run."""
    args = parse(*ALL)
    first = EngineArgs.from_cli_args(args)
    second = AsyncEngineArgs.from_cli_args(args)
    assert first.kv_transfer_config == second.kv_transfer_config
    assert first.ec_transfer_config == second.ec_transfer_config


def test_flags_long_form_is_unchanged() -> None:
    long = {"kv_connector": "CornplugConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    made = engine_args("--kv-transfer-config", json.dumps(long))
    kept = made.kv_transfer_config
    assert kept is not None
    assert {name: getattr(kept, name) for name in long} == long
    assert made.ec_transfer_config is None


# -- the process's runtime --------------------------------------------------------------------


def test_runtime_of_equal_settings_is_shared(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "_runtimes", {})
    monkeypatch.setenv("CORNPLUG_STORE_AUTOSTART", "false")
    extra = {"store.socket": str(short_path / "s"), "store.secret_file": str(short_path / "secret")}
    first = runtime_module.get_runtime(extra)
    try:
        assert runtime_module.get_runtime(dict(reversed(extra.items()))) is first
        assert first.app == "default"
        assert first.secret == (short_path / "secret").read_bytes()
        assert first.deadline_s < first.background_timeout_s
    finally:
        first.store.close()


def test_runtime_without_secret_shares_nothing(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A home that cannot be written to, an arbitrary user: nothing is shared, and that is all."""
    (short_path / "home").write_text("no folder")
    monkeypatch.setattr(runtime_module, "_runtimes", {})
    off = runtime_module.get_runtime({"store.secret_file": str(short_path / "home" / "secret")})
    assert "shares nothing: store.secret_file" in caplog.text
    with expect_error(StoreUnavailable, reason="store_off", match=r"store\.secret_file"):
        off.store.contains([bytes(32)], deadline_s=1)
    off.store.close()


def test_runtime_in_untested_vllm_is_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_state", {"registered": False})
    with (
        mock.patch.object(VersionRange, "installed_version", return_value="0.99.0"),
        expect_error(ConfigError, field="--kv-connector", match=r"0\.99\.0"),
    ):
        runtime_module.get_runtime({})


@pytest.mark.more  # vLLM looks at a model class in a process of its own: 10 s each
@pytest.mark.parametrize("tower", [True, False])
def test_kv_connector_for_text_model_shares_kv_alone(tmp_path: Path, tower: bool) -> None:
    make = qwen2_vl if tower else qwen2_text
    args = ("--model", str(make(tmp_path / "model")), "--kv-connector", "cornplug", "--max-model-len", "512")
    config = engine_args(*args).create_engine_config()
    assert config.kv_transfer_config.kv_connector == plugin.KV_CONNECTOR
    assert (config.ec_transfer_config is not None) is tower
