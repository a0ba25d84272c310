"""What the doctor says of tiny checkpoints, by vLLM's own configuration and model classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cornplug.commands.engine_checks import VLLM
from cornplug.sharing_verdict import NO_TOWER, SharingVerdict, verdicts_of
from devkit import checkpoints

pytestmark = pytest.mark.integration  # vLLM looks at each model class in a process of its own


def said(model: Path, **env: str) -> dict[str, SharingVerdict]:
    """What a process of vLLM says of it."""
    done = subprocess.run(
        [sys.executable, "-c", VLLM.model_probe, str(model), ""],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    return {verdict.what: verdict for verdict in verdicts_of(done.stdout)}


def test_sharing_report_of_text_is_kv_alone(tmp_path: Path) -> None:
    text = checkpoints.qwen2_text(tmp_path / "text")
    assert said(text) == {
        "KV": SharingVerdict(what="KV", shared=True),
        "embeddings": SharingVerdict(what="embeddings", shared=False, why=NO_TOWER),
    }
    off = said(text, CORNPLUG_ENGINE_SHARE_KV="false")["KV"]
    assert (off.shared, off.why) == (False, "engine.share_kv is false")


def test_sharing_report_of_windows_names_a_remedy(tmp_path: Path) -> None:
    folder = checkpoints.gemma3(tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["layer_types"] = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    found = said(folder)
    assert found["embeddings"].shared
    assert (found["KV"].shared, "KV cache groups" in found["KV"].why) == (False, True)
    assert "--disable-hybrid-kv-cache-manager" in found["KV"].remedy


def test_sharing_report_of_a_strange_tower_says_why(tmp_path: Path) -> None:
    found = said(checkpoints.qwen2_audio(tmp_path / "audio"))
    assert found["KV"].shared
    assert (found["embeddings"].shared, "compares" in found["embeddings"].why) == (False, True)


def test_sharing_report_of_no_checkpoint_is_an_answer(tmp_path: Path) -> None:
    found = said(tmp_path)
    assert [verdict.shared for verdict in found.values()] == [False, False]
    assert all("does not run it" in verdict.why for verdict in found.values())


def test_sharing_report_of_unreadable_weights_names_no_remedy_for_windows(tmp_path: Path) -> None:
    text = checkpoints.qwen2_text(tmp_path / "text")
    (text / "consolidated.safetensors").symlink_to("model.safetensors")
    kv = said(text)["KV"]
    assert (kv.shared, "consolidated" in kv.why, kv.remedy) == (False, True, "")
