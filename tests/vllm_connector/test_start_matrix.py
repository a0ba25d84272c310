"""No command line that stock vLLM accepts may fail with `--kv-connector cornplug` added to it.

vLLM's own parser and its own configuration classes, once without us and once with us. What starts in
earnest is in `tests/integration/test_starts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from cornplug.vllm_connector import connector_config, plugin
from devkit.checkpoints import llava, qwen2_text, qwen2_vl
from devkit.checkpoints.text import deepseek_v2
from devkit.checkpoints.tiles import gemma3
from devkit.vllm_cli import parse_serve

pytestmark = pytest.mark.more  # vLLM looks at each model class in a process of its own

MODELS: dict[str, Callable[[Path], Path]] = {
    "text": qwen2_text,
    "vl": qwen2_vl,
    "llava": llava,
    "mla": deepseek_v2,
    "gemma3": gemma3,
}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

LINES: dict[str, tuple[str, str]] = {
    "plain": ("text", ""),
    "no prefix caching": ("text", "--no-enable-prefix-caching"),
    "no chunked prefill": ("text", "--no-enable-chunked-prefill --max-num-batched-tokens 4096"),
    "fp8 KV": ("text", "--kv-cache-dtype fp8"),
    "no hybrid manager": ("text", "--disable-hybrid-kv-cache-manager"),
    "n-gram speculation": (
        "text",
        '--speculative-config {"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}',
    ),
    "LoRA": ("text", "--enable-lora --max-lora-rank 8"),
    "tensor parallel": ("text", "--tensor-parallel-size 2"),
    "pipeline parallel": ("text", "--pipeline-parallel-size 2"),
    "data parallel": ("text", "--data-parallel-size 2"),
    "context parallel": ("mla", "--tensor-parallel-size 2 --decode-context-parallel-size 2"),
    "embeddings": ("text", "--runner pooling --convert embed"),
    "classifier": ("text", "--runner pooling --convert classify"),
    "large blocks": ("text", "--block-size 256"),
    "asynchronous scheduling": ("text", "--async-scheduling"),
    "priorities": ("text", "--scheduling-policy priority"),
    "dummy weights": ("text", "--load-format dummy"),
    "overrides": ("text", '--hf-overrides {"rope_theta":1000.0}'),
    "KV events": ("text", '--kv-events-config {"enable_kv_cache_events":true,"publisher":"null"}'),
    "expandable segments": ("text", "EXPANDABLE"),
    "prompt embeddings": ("text", "--enable-prompt-embeds"),
    "long context": ("text", "--max-model-len 4096 --max-num-seqs 4"),
    "no images": ("vl", '--limit-mm-per-prompt {"image":0,"video":0}'),
    "no images, videos kept": ("vl", '--limit-mm-per-prompt {"image":0}'),
    "language model only": ("vl", "--language-model-only"),
    "encoder only": ("vl", "--mm-encoder-only"),
    "encoder data parallel": ("vl", "--mm-encoder-tp-mode data"),
    "image embeddings": ("llava", "--enable-mm-embeds"),
    "no processor cache": ("vl", "--mm-processor-cache-gb 0"),
    "no profiling of images": ("vl", "--skip-mm-profiling"),
    "whole images": ("vl", "--disable-chunked-mm-input"),
    "transformers backend": ("vl", "--model-impl transformers"),
    "MLA": ("mla", ""),
    "sliding windows": ("gemma3", ""),
    "encoder-decoder": ("whisper", ""),
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    plugin.register()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = whisper_config(folder) if name == "whisper" else MODELS[name](folder / name)
        return made[name]

    return get


def whisper_config(folder: Path) -> Path:
    """A Whisper's config.json: all that a configuration is made of."""
    path = folder / "whisper"
    path.mkdir()
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "vocab_size": 300,
        "max_target_positions": 64,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def configured(model: Path, line: str, *ours: str) -> Any:
    args = parse_serve(["--model", str(model), "--max-model-len", "64", *line.split(), *ours])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


@pytest.mark.parametrize("name", LINES)
def test_vllm_line_of_stock_is_accepted_with_cornplug(
    name: str, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    which, line = LINES[name]
    if line == "EXPANDABLE":
        line = ""
        monkeypatch.setenv(*next(iter(EXPANDABLE.items())))
    path = model(which)
    try:
        stock = configured(path, line)
    except (ValueError, NotImplementedError, AssertionError) as e:
        pytest.skip(f"stock refuses it on this machine: {e}")
    with_us = configured(path, line, "--kv-connector", "cornplug")
    assert stock.kv_transfer_config is None
    kv_shared = with_us.kv_transfer_config is not None
    assert kv_shared is (name not in ("expandable segments", "encoder only", "encoder-decoder"))
    if not kv_shared:
        # As stock, in everything that a connector would have changed.
        assert with_us.scheduler_config.disable_hybrid_kv_cache_manager is (
            stock.scheduler_config.disable_hybrid_kv_cache_manager
        )


def test_connector_config_of_encoder_alone_is_a_producer_without_kv(
    model: Callable[[str], Path],
) -> None:
    """vLLM's first runner leaves the language model out for the role, not for the flag; it then calls it."""
    ours = "--mm-encoder-only", "--kv-connector", "cornplug"
    config = configured(model("vl"), "--mm-tensor-ipc torch_shm", *ours)
    assert config.kv_transfer_config is None
    assert config.ec_transfer_config.ec_role == "ec_producer"
    assert "encoder" in connector_config.kv_refusal()
    mm_config = config.model_config.multimodal_config
    assert mm_config.mm_encoder_only
    assert not mm_config.enable_mm_embeds
    # With tensors on the GPU vLLM would let a producer preprocess there, and no consumer does.
    assert mm_config.mm_processor_kwargs == {"device": "cpu"}
    asked = "--mm-processor-kwargs", '{"device":"cuda"}'
    there = configured(model("vl"), "--mm-tensor-ipc torch_shm", *ours, *asked)
    assert there.model_config.multimodal_config.mm_processor_kwargs == {"device": "cuda"}


def test_connector_config_of_producer_by_role_has_no_kv(model: Callable[[str], Path]) -> None:
    ec = json.dumps({"ec_connector": "CornplugECConnector", "ec_role": "ec_producer"}, separators=(",", ":"))
    kv = json.dumps({"kv_connector": "CornplugConnector", "kv_role": "kv_both"}, separators=(",", ":"))
    config = configured(model("vl"), f"--ec-transfer-config {ec} --kv-transfer-config {kv}")
    assert config.is_mm_encoder_only
    assert (config.kv_transfer_config, config.ec_transfer_config.ec_role) == (None, "ec_producer")


def test_connector_config_of_text_model_ignores_encoder_flag_as_stock(model: Callable[[str], Path]) -> None:
    config = configured(model("text"), "--mm-encoder-only", "--kv-connector", "cornplug")
    assert not config.is_mm_encoder_only
    assert config.kv_transfer_config is not None


def connectors(policy: str) -> str:
    ours = {"kv_connector": "CornplugConnector", "kv_role": "kv_both"}
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "unused"},
    }
    return json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": [ours, other]},
        },
        separators=(",", ":"),
    )


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_connector_config_of_several_sets_recompute(
    model: Callable[[str], Path], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler goes by the policy of the whole, the connector's own is not asked."""
    kv = configured(model("text"), "--kv-transfer-config " + connectors(policy)).kv_transfer_config
    assert kv.kv_load_failure_policy == "recompute"
    ours, other = kv.kv_connector_extra_config["connectors"]
    assert ours["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in other


def test_vllm_refusal_with_cornplug_equals_stock(model: Callable[[str], Path]) -> None:
    line = "--max-model-len 100000000"
    with pytest.raises(ValueError, match="max_model_len") as stock:
        configured(model("text"), line)
    with pytest.raises(ValueError, match="max_model_len") as with_us:
        configured(model("text"), line, "--kv-connector", "cornplug")
    assert str(with_us.value) == str(stock.value)


def test_kv_impossible_backend_without_connector_is_named() -> None:
    """ROCm's, which a CPU has not: by its class alone."""
    backend = SimpleNamespace(
        name="ROCM_ATTN", get_class=lambda: SimpleNamespace(supports_kv_connector=lambda: False)
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=False),
        attention_config=SimpleNamespace(backend=backend),
    )
    assert (
        connector_config.kv_connector_problem(config)
        == "attention backend ROCM_ATTN does not support KV connectors"
    )
