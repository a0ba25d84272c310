"""Front ends of SGLang: each that can run this room's hooks runs them, of the others the log says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from unittest import mock

import pytest
from sglang.srt.plugins import load_plugins

from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.kv import hicache_config
from devkit import checkpoints

from .test_flags import resolved
from .zygote import Zygote

VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hicache_config, "compile_hash", lambda: None)
    monkeypatch.delenv(VARIABLE, raising=False)
    load_plugins()
    yield
    activation.turn_off()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.qwen2_vl(tmp_path_factory.mktemp("models") / "images"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.qwen2_text(tmp_path_factory.mktemp("models") / "text"))


@pytest.mark.parametrize(("workers", "application"), [("1", None), ("2", activation.HTTP_WORKERS)])
def test_tokenizer_workers_of_server_with_images_import_hooked_application(
    images: str, workers: str, application: str | None
) -> None:
    args = ("--enable-cornplug", "--enable-multimodal", "--tokenizer-worker-num", workers)
    with mock.patch.object(compat.logger, "warning") as warning:
        resolved(images, *args)
    assert os.environ.get(VARIABLE) == application
    assert "images are not shared" not in str(warning.call_args_list)


def test_tokenizer_workers_of_text_model_are_stock(text: str) -> None:
    resolved(text, "--enable-cornplug", "--tokenizer-worker-num", "2")
    assert VARIABLE not in os.environ


def test_tokenizer_workers_of_next_server_are_stock(images: str) -> None:
    args = ("--enable-multimodal", "--tokenizer-worker-num", "2")
    resolved(images, "--enable-cornplug", *args)
    assert VARIABLE in os.environ
    resolved(images, *args)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (("--tokenizer-worker-num", "2"), {VARIABLE: "their.module:app"}, VARIABLE),
        ((), {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
        (("--smg-grpc-mode",), {}, "--smg-grpc-mode"),
    ],
)
def test_tokenizer_workers_front_end_without_plugins_is_warned_of(
    images: str, args: tuple[str, ...], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(compat.logger, "warning") as warning:
        resolved(images, "--enable-cornplug", "--enable-multimodal", *args)
    (call,) = [call for call in warning.call_args_list if "images are not shared" in call.args[0]]
    assert said in call.args[1]
    assert os.environ.get(VARIABLE) == env.get(VARIABLE)


_IMPORTED = """
import json
from sglang.srt.environ import envs
from uvicorn.importer import import_from_string
app = import_from_string(envs.SGLANG_HTTP_SERVER_APP_PATH.get())
from sglang.srt.entrypoints import http_server
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps([app is http_server.app, sorted(HookRegistry._patched)]))
"""


def test_http_workers_application_is_sglangs_with_hooks_in_place(zygote: Zygote) -> None:
    env = {
        VARIABLE: activation.HTTP_WORKERS,
        "CORNPLUG_SGLANG": "{}",
        "CORNPLUG_SGLANG_PARTS": "images,weights",
    }
    done = zygote.run(code=_IMPORTED, env=env)
    assert done.returncode == 0, done.stderr
    is_theirs, hooked = json.loads(done.stdout.splitlines()[-1])
    assert is_theirs
    assert "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request" in hooked
