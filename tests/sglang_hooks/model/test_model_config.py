"""SGLang's settings as identities: of one checkpoint the same as vLLM's, unless values differ."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks.compat import validated_families
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS, describe, draft_model

_CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1024,
    "max_position_embeddings": 4096, "dtype": "bfloat16", "rope_parameters": {"rope_type": "default"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


def described(folder: Path, **settings: Any) -> EngineModel:
    args = ServerArgs(model_path=str(folder), device="cpu", **settings)
    return describe(args, ModelConfig.from_server_args(args))


def test_describe_plain_settings_has_no_overrides(folder: Path) -> None:
    """The form of `vllm_connector.model`: nothing overridden is {}."""
    made = described(folder)
    assert (made.dtype, made.max_model_len, made.overrides, made.processor_kwargs) == (
        "bfloat16",
        4096,
        {},
        {},
    )
    assert made.checkpoint.kv_spec() == Checkpoint.open(str(folder)).kv_spec()


@pytest.mark.parametrize(
    ("dtype", "runs"), [("float32", "float32"), ("half", "float16"), ("auto", "bfloat16")]
)
def test_describe_dtype_is_resolved_dtype(folder: Path, dtype: str, runs: str) -> None:
    assert described(folder, dtype=dtype).dtype == runs


def test_describe_context_length_is_max_model_len(folder: Path) -> None:
    assert described(folder, context_length=1024).max_model_len == 1024


def test_describe_config_overrides_are_overrides(folder: Path) -> None:
    made = described(folder, json_model_override_args='{"rope_theta": 5000.0}')
    assert made.overrides == {"hf_overrides": {"rope_theta": 5000.0}}


def test_describe_quantisation_at_load_is_override(folder: Path) -> None:
    assert described(folder, quantization="fp8").overrides == {"sglang_quantization": "fp8"}


def test_describe_declared_quantisation_is_no_override(folder: Path) -> None:
    declared = {"quant_method": "awq"}
    assert _described_with(folder, declared, quantization="awq").overrides == {}


def test_describe_precise_interpolation_is_override(folder: Path) -> None:
    made = described(folder, enable_precise_embedding_interpolation=True)
    assert made.overrides == {"ServerArgs.enable_precise_embedding_interpolation": True}


def test_describe_image_processor_settings_are_kwargs(folder: Path) -> None:
    made = described(folder, mm_process_config={"image": {"max_pixels": 50176}, "video": {"fps": 1}})
    assert made.processor_kwargs == {"max_pixels": 50176}


@pytest.mark.parametrize("load_format", sorted({*LOAD_FORMAT_CHOICES, "ipc_cache"} - READS_SAFETENSORS))
def test_describe_other_load_format_is_refused(folder: Path, load_format: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        described(folder, load_format=load_format)
    assert caught.value.reason == "load_format"


@pytest.mark.parametrize(
    "settings",
    [
        {"custom_weight_loader": ["mine.load"]},
        {"decrypted_config_file": "/x/config.json"},
        {"kt_weight_path": "/x"},
        {"modelopt_checkpoint_restore_path": "/x"},
        {"forward_hooks": [{"target_modules": ["model.layers.0"]}]},
        {"weight_cache_mode": "client"},
        {"model_loader_extra_config": '{"presharded_path": "/x"}'},
        {"enable_mm_global_cache": True},
        {"enable_mis": True},
        {"kv_canary": "log"},
    ],
)
def test_describe_other_weight_source_is_refused(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        _described_with(folder, None, **settings)


def test_sglang_gemma3_tower_activation_excludes_family() -> None:
    """SGLang 0.5.23 gives every SigLIP CLIP's QuickGELU, whatever the checkpoint says."""
    from sglang.srt.layers.activation import QuickGELU
    from sglang.srt.models.siglip import SiglipVisionModel

    assert inspect.signature(SiglipVisionModel).parameters["act_layer"].default is QuickGELU
    assert "gemma3" not in validated_families("float32")


def _described_with(folder: Path, quantization_config: Any, **settings: Any) -> EngineModel:
    """With a ModelConfig that SGLang itself would check further than this needs."""
    model = SimpleNamespace(
        model_path=str(folder),
        revision=None,
        dtype=torch.bfloat16,
        context_len=64,
        pointer_head=None,
        hf_config=SimpleNamespace(quantization_config=quantization_config),
    )
    return describe(ServerArgs(model_path=str(folder), **settings), model)


def test_draft_model_names_every_setting_of_speculation_but_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drafted(**settings: Any) -> EngineModel:
        plain = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
        args = ServerArgs(model_path=str(folder), device="cpu", **plain | settings)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
        return draft_model(ModelConfig.from_server_args(args))

    found = drafted()
    assert found.overrides == {"sglang_draft": {"speculative_algorithm": "STANDALONE"}}
    assert found.checkpoint.path == folder
    assert drafted(speculative_draft_attention_backend="triton").overrides != found.overrides
    assert drafted(speculative_draft_model_revision="main").overrides == found.overrides
