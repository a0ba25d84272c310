"""Clients of an application: openai's classes, their arguments, and the errors of wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from expected_errors import expect_error

from cornplug.apps import AppsFile, RequestSpec
from cornplug.errors import ConfigError

from ..services import services
from .callers import APP, ASK, chat
from .fake_engine import engines


def test_client_is_openai_s_own_and_sends_no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with engines(1) as (engine,):
        with APP.client(routes=[engine.url]) as client:
            assert isinstance(client, openai.OpenAI)
            client.chat.completions.create(**ASK)
            assert client.max_retries == 0
        assert engine.seen[0].headers["authorization"] == "Bearer none"


def test_client_of_a_launch_s_class_follows_its_routes(tmp_path: Path) -> None:
    app = APP.model_copy(
        update={"requests": [RequestSpec(name=name, rate=1.0) for name in ("text", "image")]}
    )
    with engines(2) as (a, b):
        table: dict[str, Any] = {
            "chat/text": {"priority": -1, "to": [{"weight": 1.0, "url": a.url}]},
            "chat/image": {"priority": -2, "cache_salt": "acme", "to": [{"weight": 1.0, "url": b.url}]},
        }
        (tmp_path / "routes.json").write_text(json.dumps(table))
        chat("sync", tmp_path, app=app, request="image")
        assert (a.seen, b.bodies[0]["priority"], b.bodies[0]["cache_salt"]) == ([], -2, "acme")


@pytest.mark.parametrize("name", ["base_url", "http_client"])
def test_client_argument_that_it_sets_itself_is_refused(name: str) -> None:
    with expect_error(ConfigError, field=name):
        APP.client(routes=["http://a"], **{name: "x"})


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_client_retry_time_of_no_seconds_is_refused(seconds: float) -> None:
    with expect_error(ConfigError, field="retry_s"):
        APP.client(routes=["http://a"], retry_s=seconds)


def test_client_without_openai_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with expect_error(ConfigError, field="client"):
        APP.client(routes=["http://a"])


def test_application_of_a_file_gives_a_client(tmp_path: Path) -> None:
    file: AppsFile = services(tmp_path)
    with file.application("tts").client(routes=["http://a"]) as client:
        assert isinstance(client, openai.OpenAI)
    with expect_error(ConfigError, field="application", match="'chat'"):
        file.application("chat")


def test_apps_without_a_client_import_neither_openai_nor_the_package() -> None:
    code = (
        "import sys, cornplug.apps; "
        "assert not {'openai', 'cornplug.apps.client'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
