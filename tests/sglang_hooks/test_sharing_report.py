"""What the doctor says of tiny checkpoints, by SGLang's own resolution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.mem_cache import host_memory

from cornplug.commands import engine_checks
from cornplug.commands.engine_checks import SGLANG
from cornplug.sglang_hooks import sharing_report
from cornplug.sharing_verdict import NO_TOWER, SharingVerdict
from devkit import checkpoints

from .zygote import Zygote


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory enough for HiCache, whatever this machine has."""
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: 64 << 30)


def test_sharing_report_of_text_is_kv_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(checkpoints.qwen2_text(tmp_path / "text"))
    assert sharing_report.describe(text) == [
        SharingVerdict(what="KV", shared=True),
        SharingVerdict(what="embeddings", shared=False, why=NO_TOWER),
    ]
    monkeypatch.setenv("CORNPLUG_ENGINE_SHARE_KV", "false")
    kv, _ = sharing_report.describe(text)
    assert (kv.shared, kv.why) == (False, "engine.share_kv is false")


def test_sharing_report_of_windows_beside_images_says_why(tmp_path: Path) -> None:
    folder = checkpoints.gemma3(tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["layer_types"] = ["sliding_attention"] * (text["num_hidden_layers"] - 1) + ["full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    # SGLang serves Gemma 3 without images unless it is told otherwise.
    kv, _ = sharing_report.describe(str(folder))
    assert kv == SharingVerdict(what="KV", shared=True)
    kv, _ = sharing_report.describe(str(folder), ["--enable-multimodal"])
    assert (kv.shared, "hybrid" in kv.why) == (False, True)


def test_sharing_report_of_a_compared_tower_is_embeddings_too(tmp_path: Path) -> None:
    _, embeddings = sharing_report.describe(
        str(checkpoints.qwen2_vl(tmp_path / "vl")), ["--dtype", "float32"]
    )
    assert embeddings == SharingVerdict(what="embeddings", shared=True)


def test_sharing_report_of_no_checkpoint_is_an_answer(tmp_path: Path) -> None:
    found = sharing_report.describe(str(tmp_path))
    assert [verdict.shared for verdict in found] == [False, False]


def test_sharing_report_of_flags_is_of_the_server_as_started(tmp_path: Path) -> None:
    text = str(checkpoints.qwen2_text(tmp_path / "text"))
    kv, _ = sharing_report.describe(text, ["--port", "8000", "--disable-radix-cache"])
    assert (kv.shared, "radix" in kv.why) == (False, True)


def test_sharing_report_knows_the_plugins_flags(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin adds its flags to SGLang's parser in a process of its own."""
    monkeypatch.setattr(engine_checks, "_run", lambda code, *argv, timeout_s: zygote.run(*argv, code=code))
    text = str(checkpoints.qwen2_text(tmp_path / "text"))
    kv, _ = engine_checks.check_sharing(SGLANG, text, ["--enable-cornplug", "--cornplug-app", "chat"])
    assert (kv.status, kv.what) == ("ok", f"{text}: KV shared")
    wrong, _ = engine_checks.check_sharing(SGLANG, text, ["--cornplug-store-deadline", "soon"])
    assert (wrong.status, "store.deadline_s" in wrong.what) == ("warn", True)
