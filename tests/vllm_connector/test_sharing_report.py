"""What the doctor says of tiny checkpoints, by vLLM's own configuration and model classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cornplug.commands import engine_checks
from cornplug.commands.engine_checks import VLLM
from cornplug.sharing_verdict import NO_TOWER, SharingVerdict, decode_verdicts
from devkit import checkpoints, vllm_beds
from devkit.quantised import with_kv_scales

# One process builds every kind, and one starts as the doctor starts it.
pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]


# A process imports vLLM for a quarter of a minute: one looks at all of them, and at the model classes itself
# (vLLM starts a process for each, so that none touches a GPU).
_ALL = """
import os, sys
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
registry._run_in_subprocess = lambda look: look()
load_general_plugins()
from cornplug.sharing_verdict import encode_verdicts
from cornplug.vllm_connector.sharing_report import describe
exact = ["--dtype", "float32"]  # vLLM makes bfloat16 of a float32 checkpoint
for model in sys.argv[1:]:
    print(encode_verdicts(describe(model, exact if model == sys.argv[2] else [])))
for flags in {flags}:
    print(encode_verdicts(describe(sys.argv[1], flags.split())))
draft = '{"method":"draft_model","num_speculative_tokens":2,"model":"%s"}' % sys.argv[1]
print(encode_verdicts(describe(sys.argv[1], ["--speculative-config", draft])))
eagle = '{"method":"eagle","num_speculative_tokens":2,"model":"%s-eagle"}' % sys.argv[1]
print(encode_verdicts(describe(sys.argv[1], ["--speculative-config", eagle])))
windowed = sys.argv[1] + "-windowed"
for method, draft in ("eagle3", "head"), ("draft_model", "unlike"):
    found = '{"method":"%s","num_speculative_tokens":2,"model":"%s-%s"}' % (method, windowed, draft)
    print(encode_verdicts(describe(windowed, ["--speculative-config", found])))
print(encode_verdicts(describe(sys.argv[4], ["--no-enable-prefix-caching"])))
print(encode_verdicts(describe(sys.argv[2], [*exact, "--mm-encoder-only"])))
print(encode_verdicts(describe(sys.argv[2], [*exact, "--enable-scale-out"])))
os.environ["CORNPLUG_ENGINE_PAGE_TOKENS"] = "48"
print(encode_verdicts(describe(sys.argv[2])))
os.environ["CORNPLUG_ENGINE_SHARE_KV"] = "false"
print(encode_verdicts(describe(sys.argv[1])))
del os.environ["CORNPLUG_ENGINE_SHARE_KV"]
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
print(encode_verdicts(describe(sys.argv[1])))
"""

_DRAFTS = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}'
FLAGS = {
    "text, as started": "--port 8000 --api-server-count 2 --kv-connector cornplug --cornplug-app chat",
    "text, fp8": "--kv-cache-dtype fp8",
    "text, degrees": "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2",
    "text, guesses": f"--tensor-parallel-size 2 --speculative-config {_DRAFTS}",
    "text, int8": "--kv-cache-dtype int8_per_token_head",
}
AROUND = (
    "text, draft",
    "text, EAGLE",
    "windows, EAGLE-3",
    "windows, draft model",
    "states, no prefix caching",
    "windows, encoder only",
    "windows, rendered elsewhere",
    "windows, odd pages",
    "text, KV off",
    "text, no connector",
)

Said = dict[str, SharingVerdict]


_SOME = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from cornplug.sharing_verdict import encode_verdicts
from cornplug.vllm_connector.sharing_report import describe
for model in sys.argv[1:]:
    print(encode_verdicts(describe(model, ["--dtype", "float32"])))
"""


def run(program: str, *arguments: str, python: str = sys.executable) -> list[Said]:
    """The verdicts in those lines of a process's output that are a list."""
    done = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = (line for line in done.stdout.splitlines() if line.startswith("["))
    return [{verdict.what: verdict for verdict in decode_verdicts(line)} for line in lines]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_text(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def models(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "text": text,
        "windows": _with_windows(folder / "windows"),
        "latents": checkpoints.deepseek_v2(folder / "latents", kv_lora_rank=512, rope_dim=64),
        "states": checkpoints.qwen3_5_text(folder / "states"),
        "scales": with_kv_scales(text, folder / "scales", k_scale=0.5, v_scale=0.5),
        "sinks": checkpoints.gpt_oss(folder / "sinks"),
        "chunks": checkpoints.llama4_text(folder / "chunks"),
        "caches of others": checkpoints.gemma3n_text(folder / "caches"),
        "convolutions": checkpoints.lfm2(folder / "convolutions"),
        "states beside KV": checkpoints.falcon_h1(folder / "both"),
        "states alone": checkpoints.mamba2(folder / "alone"),
        "audio": checkpoints.qwen2_audio(folder / "audio"),
        "none": folder,
        "unreadable": checkpoints.qwen2_text(folder / "unreadable"),
    }


@pytest.fixture(scope="module")
def said(text: Path, models: Mapping[str, Path]) -> Mapping[str, Said]:
    """Checkpoint -> the verdicts of vLLM."""
    checkpoints.eagle_head(f"{text}-eagle", text)
    windowed = checkpoints.llama_windowed(f"{text}-windowed", windows=3, full=2)
    checkpoints.eagle3_head(f"{windowed}-head", windowed, seen=(1, 2, 4))
    checkpoints.qwen2_text(f"{windowed}-unlike", heads=4)
    (models["unreadable"] / "consolidated.safetensors").symlink_to("model.safetensors")
    found = run(_ALL.replace("{flags}", repr(list(FLAGS.values()))), *map(str, models.values()))
    return dict(zip((*models, *FLAGS, *AROUND), found, strict=True))


def _with_windows(folder: Path) -> Path:
    checkpoints.gemma3(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["layer_types"] = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sharing_report_of_the_next_release_is_the_same(
    models: Mapping[str, Path], said: Mapping[str, Said]
) -> None:
    python = vllm_beds.next_vllm().with_name("python")
    names = ["windows", "chunks", "audio"]
    found = run(_SOME, *(str(models[name]) for name in names), python=str(python))
    verdicts = [{what: verdict.shared for what, verdict in one.items()} for one in found]
    assert verdicts == [{what: verdict.shared for what, verdict in said[name].items()} for name in names]


def test_sharing_report_server_of_rendered_requests_has_a_remedy(said: Mapping[str, Said]) -> None:
    found = said["windows, rendered elsewhere"]["embeddings"]
    assert (found.shared, "/inference/v1/generate" in found.remedy) == (True, True)
    assert said["windows"]["embeddings"].remedy == ""


def test_sharing_report_doctor_asks_for_it(text: Path, said: Mapping[str, Said]) -> None:
    assert run(VLLM.model_probe, str(text)) == [said["text"]]
    (finding,) = engine_checks.check_sharing(VLLM, str(text), ["--no-such-flag"])
    assert (finding.status, "unrecognized arguments: --no-such-flag" in finding.what) == ("fail", True)


def test_sharing_report_of_text_is_kv_alone(said: Mapping[str, Said]) -> None:
    assert said["text"] == {
        "KV": SharingVerdict(what="KV", shared=True),
        "embeddings": SharingVerdict(what="embeddings", shared=False, why=NO_TOWER),
    }
    off = said["text, KV off"]["KV"]
    assert (off.shared, off.why) == (False, "engine.share_kv is false")


@pytest.mark.parametrize("name", ["text, as started", "text, fp8", "text, degrees", "text, guesses"])
def test_sharing_report_of_flags_that_share_is_kv(name: str, said: Mapping[str, Said]) -> None:
    assert said[name] == said["text"]


def test_sharing_report_of_flags_that_do_not_share_says_why(said: Mapping[str, Said]) -> None:
    quantised = said["text, int8"]["KV"]
    assert (quantised.shared, "quantised" in quantised.why) == (False, True)
    refused = said["text, no connector"]["KV"]
    assert (refused.shared, "expandable_segments" in refused.why) == (False, True)


KINDS = [
    *(
        "latents",
        "states",
        "scales",
        "text, draft",
        "text, EAGLE",
        "windows, EAGLE-3",
        "sinks",
        "caches of others",
    ),
    *("convolutions", "states beside KV"),
]


@pytest.mark.parametrize("name", KINDS)
def test_sharing_report_of_every_kind_is_kv(name: str, said: Mapping[str, Said]) -> None:
    assert said[name]["KV"] == SharingVerdict(what="KV", shared=True)


def test_sharing_report_of_states_alone_says_why(said: Mapping[str, Said]) -> None:
    found = said["states alone"]["KV"]
    assert (found.shared, "MambaSpec" in found.why) == (False, True)


def test_sharing_report_of_states_without_prefix_caching_says_why(said: Mapping[str, Said]) -> None:
    found = said["states, no prefix caching"]["KV"]
    assert (found.shared, "--enable-prefix-caching" in found.why) == (False, True)


def test_sharing_report_of_windows_is_shared(said: Mapping[str, Said]) -> None:
    assert (said["windows"]["embeddings"].shared, said["windows"]["KV"].shared) == (True, True)


def test_sharing_report_of_encoder_alone_is_embeddings(said: Mapping[str, Said]) -> None:
    found = said["windows, encoder only"]
    assert (found["embeddings"].shared, found["KV"].shared) == (True, False)
    assert found["KV"].why == "this engine runs the encoder only"


def test_sharing_report_of_a_draft_beside_windows_says_why(said: Mapping[str, Said]) -> None:
    found = said["windows, draft model"]["KV"]
    assert (found.shared, "method draft_model" in found.why) == (False, True)


def test_sharing_report_of_chunks_names_a_remedy(said: Mapping[str, Said]) -> None:
    found = said["chunks"]["KV"]
    assert (found.shared, "ChunkedLocalAttentionSpec" in found.why) == (False, True)
    assert "--disable-hybrid-kv-cache-manager" in found.remedy


def test_sharing_report_of_windows_in_other_blocks_names_a_remedy(said: Mapping[str, Said]) -> None:
    found = said["windows, odd pages"]
    assert (found["KV"].shared, "KV cache groups" in found["KV"].why) == (False, True)
    assert "--disable-hybrid-kv-cache-manager" in found["KV"].remedy


def test_sharing_report_of_a_strange_tower_says_why(said: Mapping[str, Said]) -> None:
    found = said["audio"]
    assert found["KV"].shared
    assert not found["embeddings"].shared
    assert "has not been tested" in found["embeddings"].why


def test_sharing_report_of_no_checkpoint_is_an_answer(said: Mapping[str, Said]) -> None:
    assert [verdict.shared for verdict in said["none"].values()] == [False, False]
    assert all("does not run it" in verdict.why for verdict in said["none"].values())


def test_sharing_report_of_unreadable_weights_names_no_remedy_for_windows(said: Mapping[str, Said]) -> None:
    kv = said["unreadable"]["KV"]
    assert (kv.shared, "consolidated" in kv.why, kv.remedy) == (False, True, "")
