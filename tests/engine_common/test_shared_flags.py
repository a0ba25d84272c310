"""`--cornplug-encoder`: one flag for the socket of this host and the URLs of others."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.engine_common.shared_flags import add_flags, load_settings, settings_from_flags
from cornplug.errors import ConfigError

URLS = "http://10.0.0.7:8750,https://encoder.example.org"


def extra(*flags: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    add_flags(parser, "--on", action="store_true")
    return settings_from_flags(parser.parse_args(flags))


def test_encoder_flag_takes_a_path_or_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    assert extra("--cornplug-encoder", "/run/e.sock") == {"encoder.socket": "/run/e.sock"}
    assert extra("--cornplug-encoder", URLS) == {"encoder.engine_urls": URLS}
    assert load_settings(extra("--cornplug-encoder", URLS)).encoder.engine_urls == tuple(URLS.split(","))


def test_encoder_flag_takes_a_weight_behind_each_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    config = load_settings(extra("--cornplug-encoder", "http://a:8750#3,http://b:8750#0.5"))
    assert config.encoder.engine_urls == ("http://a:8750#3", "http://b:8750#0.5")


def test_encoder_flag_with_a_path_is_stronger_than_urls_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("CORNPLUG_ENCODER_ENGINE_URLS", URLS)
    assert load_settings(extra()).encoder.engine_urls == tuple(URLS.split(","))
    config = load_settings(extra("--cornplug-encoder", "/run/e.sock"))
    assert (config.encoder.socket, config.encoder.engine_urls) == (Path("/run/e.sock"), ())


def test_encoder_flag_with_a_wrong_url_or_the_default_secret_is_refused_at_start() -> None:
    with expect_error(ConfigError, field="store.secret_file"):
        load_settings(extra("--cornplug-encoder", URLS))
    with expect_error(ConfigError, field="encoder.engine_urls"):
        load_settings(extra("--cornplug-encoder", "tcp://10.0.0.7:1"))
