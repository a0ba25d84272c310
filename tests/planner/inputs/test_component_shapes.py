"""Sizes: against published figures, and against what transformers builds for the same config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs import component_shapes, llm_shape
from cornplug.planner.inputs.component_shapes import (
    fingerprint_of,
    kv_bytes_per_token,
    shape_of,
    weights_bytes,
)
from cornplug.planner.inputs.schema import Component, GeneratorShape, LLMShape, TowerShape
from devkit.checkpoints import bare

QWEN2_7B = {
    **{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944},
    **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": False},
}
LLAMA3_8B = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}
QWEN3_4B = {
    **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tie_word_embeddings": True,
}
MISTRAL_7B = {"model_type": "mistral", "vocab_size": 32000}
MIXTRAL_8X7B = {
    **{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}
QWEN3_30B_A3B = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    **{"v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1},
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
        **{"num_hidden_layers": 34, "sliding_window": 1024},
    },
    "vision_config": {
        **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304},
        **{"num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14},
    },
}
LLAVA_7B = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14},
    },
}
QWEN2_VL_7B = {
    **{**QWEN2_7B, "model_type": "qwen2_vl", "max_position_embeddings": 32768},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16},
}
INTERNVL3_38B = {  # the layout before transformers' own
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "llm_config": {
        **{"model_type": "qwen2", "vocab_size": 151674, "hidden_size": 5120, "intermediate_size": 27648},
        **{"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8},
    },
    "vision_config": {
        **{"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "image_size": 448},
        **{"num_attention_heads": 25, "patch_size": 14},
    },
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (QWEN2_7B, 7.616e9),
        (LLAMA3_8B, 8.030e9),
        (QWEN3_4B, 4.022e9),
        (MISTRAL_7B, 7.242e9),
        (MIXTRAL_8X7B, 46.70e9),
        (QWEN3_30B_A3B, 30.53e9),
        (DEEPSEEK_V3, 671.0e9),
        (GEMMA3_4B, 3.880e9),
        (LLAVA_7B, 6.739e9),
        (QWEN2_VL_7B, 7.616e9),
        (INTERNVL3_38B, 32.76e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_published_language_models(config: dict[str, Any], published: float) -> None:
    assert llm_shape.from_config(config).parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "active"), [(MIXTRAL_8X7B, 12.88e9), (QWEN3_30B_A3B, 3.35e9), (DEEPSEEK_V3, 37.5e9)]
)
def test_llm_shape_experts_count_active_parameters(config: dict[str, Any], active: float) -> None:
    assert llm_shape.from_config(config).active_parameters == pytest.approx(active, rel=0.01)


def test_llm_shape_biases_and_shared_expert_are_counted() -> None:
    biased = {**LLAMA3_8B, "attention_bias": True}
    more = llm_shape.from_config(biased).parameters - llm_shape.from_config(LLAMA3_8B).parameters
    assert more == 32 * (4096 + 2 * 1024 + 4096)
    qwen2_moe_a14b = {
        **{"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 3584, "intermediate_size": 18944},
        **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560},
        **{"shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1},
    }
    assert llm_shape.from_config(qwen2_moe_a14b).parameters == pytest.approx(57.41e9, rel=1e-3)


def test_llm_shape_dense_has_no_active_parameters() -> None:
    assert llm_shape.from_config(QWEN2_7B).active_parameters is None


@pytest.mark.parametrize(
    ("config", "published", "patches"),
    [
        (GEMMA3_4B, 0.42e9, 16),  # SigLIP-400M, 4 x 4 patches averaged
        (LLAVA_7B, 0.291e9 + 0.021e9, 1),  # 23 of CLIP-L/336's 24 layers, and the projector
        (QWEN2_VL_7B, 0.6757e9, 4),  # "675M", with its merger
        (INTERNVL3_38B, 5.5e9 + 0.09e9, 4),  # InternViT-6B-V2.5
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_tower_shape_published_configs_match_parameters(
    config: dict[str, Any], published: float, patches: int
) -> None:
    shape = component_shapes.tower_from_config(config)
    assert shape.parameters == pytest.approx(published, rel=0.02)
    assert shape.patches_per_token == patches


def test_tower_shape_llava_layers_end_at_cut() -> None:
    assert component_shapes.tower_from_config(LLAVA_7B).layers == 23


@pytest.mark.parametrize(
    ("config", "tp", "bytes_per_token"),
    [
        (DEEPSEEK_V3, 1, 70_272),
        (DEEPSEEK_V3, 8, 70_272),  # latent attention: the same on every rank
        (INTERNVL3_38B, 2, 131_072),
        (QWEN2_7B, 1, 57_344),
        (QWEN2_7B, 4, 14_336),
        (QWEN2_7B, 8, 14_336),  # four KV heads: repeated on eight ranks
    ],
)
def test_kv_of_a_token_on_one_rank(config: dict[str, Any], tp: int, bytes_per_token: int) -> None:
    assert kv_bytes_per_token(llm_shape.from_config(config), tp=tp) == bytes_per_token


def test_kv_of_a_pipeline_and_of_eight_bits() -> None:
    shape = llm_shape.from_config(DEEPSEEK_V3)
    assert kv_bytes_per_token(shape, pp=2) == 31 * 576 * 2, "the fuller of two ranks"
    assert kv_bytes_per_token(shape, element_bytes=1) == 70_272 // 2


def test_weights_bytes_tp_pp_and_quantisation_match_published_sizes() -> None:
    shape = llm_shape.from_config(QWEN2_7B)
    assert weights_bytes(shape, "none") == pytest.approx(15.23e9, rel=1e-3)
    assert weights_bytes(shape, "none", tp=4) == pytest.approx(15.23e9 / 4, rel=1e-3)
    assert 15.23e9 / 2 < weights_bytes(shape, "none", pp=2) < 15.23e9 / 2 + 2.2e9
    # Published: Qwen2.5-7B-Instruct-AWQ 5.57 GB, an FP8 of it 8.7 GB; embeddings stay as they are.
    assert weights_bytes(shape, "awq") == pytest.approx(5.57e9, rel=0.03)
    assert weights_bytes(shape, "fp8") == pytest.approx(8.7e9, rel=0.03)
    tower = TowerShape(layers=32, hidden=1280, intermediate=5120, parameters=6.75e8)
    assert weights_bytes(tower, "fp8") == 1.35e9, "towers keep 16 bits"
    assert weights_bytes(GeneratorShape(parameters=2e9, flops_per_unit=1), "none", tp=2) == 2e9


# --- checkpoints on disk ---


def _components(*given: dict[str, Any]) -> dict[str, Component]:
    return {c.name: c for c in (Component.model_validate(row) for row in given)}


def _config_only(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_shape_of_given_shape_overrides_checkpoint(tmp_path: Path) -> None:
    folder = _config_only(tmp_path / "m", QWEN2_7B)
    own = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "parameters": 1e6}
    components = _components(
        {"name": "a", "kind": "llm", "checkpoint": folder, "shape": {"kind": "llm", **own}},
        {"name": "b", "kind": "llm", "checkpoint": folder},
        {"name": "c", "kind": "llm", "model": str(folder)},
    )
    sizes = [shape_of(c, components).parameters for c in components.values()]
    assert sizes == [1e6, *[pytest.approx(7.616e9, rel=1e-3)] * 2]


def test_shape_of_encoder_with_tower_of_reads_llm_checkpoint(tmp_path: Path) -> None:
    components = _components(
        {"name": "llm", "kind": "llm", "checkpoint": _config_only(tmp_path / "m", QWEN2_VL_7B)},
        {"name": "vit", "kind": "encoder", "tower_of": "llm"},
    )
    shape = shape_of(components["vit"], components)
    assert isinstance(shape, TowerShape)
    assert (shape.layers, shape.hidden, shape.intermediate) == (32, 1280, 5120)
    assert fingerprint_of(components["vit"], components) is None, "no weights, no fingerprint"
    assert isinstance(shape_of(components["llm"], components), LLMShape)


def test_shape_of_checkpoint_weights_are_counted_and_fingerprinted(tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "two"
    config = {**QWEN2_VL_7B, "num_hidden_layers": 1}
    for path in (folder, other):
        bare.write(path, bare.qwen2_vl_tensors(), config)
    components = _components(
        {"name": "one", "kind": "llm", "checkpoint": folder},
        {"name": "vit", "kind": "encoder", "tower_of": "one"},
        {"name": "two", "kind": "encoder", "checkpoint": other},
        {"name": "given", "kind": "encoder", "fingerprint": "abc"},
    )
    tensors = bare.qwen2_vl_tensors()
    counted = sum(math.prod(shape) for name, (_, shape, _) in tensors.items() if "visual" in name)
    assert shape_of(components["vit"], components).parameters == counted
    prints = [fingerprint_of(components[name], components) for name in ("vit", "two", "given", "one")]
    assert prints[0] is not None
    assert prints == [prints[0], prints[0], "abc", None]


def test_packed_weights_and_a_strangers_tower_are_not_counted(tmp_path: Path) -> None:
    packed = {**QWEN2_VL_7B, "quantization_config": {"quant_method": "awq"}}
    for name, config in (("packed", packed), ("stranger", INTERNVL3_38B)):
        bare.write(tmp_path / name, bare.qwen2_vl_tensors(), config)
        components = _components({"name": "x", "kind": "llm", "checkpoint": tmp_path / name})
        by_config = llm_shape.from_config(config).parameters
        assert shape_of(components["x"], components).parameters == by_config


def test_layers_for_multi_token_prediction_are_not_counted(tmp_path: Path) -> None:
    names = ("model.layers.0.w", "model.layers.1.w", "model.layers.2.w", "lm_head.weight")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tiny = {**QWEN2_7B, **heads, "num_hidden_layers": 2, "vocab_size": 1, "hidden_size": 8}
    bare.write(tmp_path, {n: bare.bare(n, shape=(8,)) for n in names}, tiny)
    components = _components({"name": "x", "kind": "llm", "checkpoint": tmp_path})
    assert shape_of(components["x"], components).parameters == 24


def test_shape_of_damaged_weights_are_reported(tmp_path: Path) -> None:
    bare.write(tmp_path, bare.qwen2_vl_tensors(), QWEN2_VL_7B)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    components = _components({"name": "x", "kind": "encoder", "checkpoint": tmp_path})
    for look in (shape_of, fingerprint_of):
        with expect_error(ConfigError, field="components[x].checkpoint"):
            look(components["x"], components)
    assert fingerprint_of(_components({"name": "y", "kind": "encoder"})["y"], {}) is None


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"model_type": "mamba"}, "llm", "config.json of 'mamba' has no "),
        (QWEN2_7B, "encoder", "config.json of 'qwen2' has no tower"),
        ({"model_type": "x", "vision_config": {"depth": 2}}, "encoder", "config.json has none of embed_dim"),
        (None, "llm", "has no config.json"),
        (
            {**QWEN2_7B, "hidden_size": 8},
            "llm",
            "config.json is invalid: head_dim: ",
        ),
    ],
)
def test_shape_of_incomplete_checkpoint_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, kind: str, message: str
) -> None:
    folder = tmp_path / "m"
    if config is None:
        folder.mkdir()
    else:
        _config_only(folder, config)
    components = _components({"name": "x", "kind": kind, "checkpoint": folder})
    with expect_error(ConfigError, field="components[x].checkpoint", match=message):
        shape_of(components["x"], components)


@pytest.mark.parametrize(
    ("kind", "remedy"), [("llm", "`checkpoint` to a folder"), ("generator", "shape = { parameters = ")]
)
def test_shape_of_missing_shape_and_checkpoint_names_remedy(kind: str, remedy: str) -> None:
    components = _components({"name": "x", "kind": kind, "model": "nobody/nothing"})
    with expect_error(ConfigError, field="components[x].shape", match=remedy):
        shape_of(components["x"], components)


# --- what transformers builds ---


def _tiny(make: str) -> Callable[[Path], Path]:
    def written(path: Path) -> Path:
        from devkit import checkpoints

        folder: Path = getattr(checkpoints, make)(path)
        return folder

    return written


@pytest.mark.parametrize(
    "make",
    [
        *("llava", "llava_next", "llava_onevision", "internvl", "gemma3", "qwen2_vl", "qwen2_5_vl"),
        *("qwen3_vl", "qwen3_vl_moe", "qwen2_audio", "ultravox", "qwen2_text", "deepseek_v2"),
    ],
)
def test_from_config_every_family_matches_counted_weights(tmp_path: Path, make: str) -> None:
    folder = _tiny(make)(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["llm"] if make in ("qwen2_text", "deepseek_v2") else ["llm", "encoder"]
    for kind in kinds:
        components = _components({"name": "x", "kind": kind, "checkpoint": folder})
        counted = shape_of(components["x"], components).parameters
        by_config: LLMShape | TowerShape
        of_kind = llm_shape.from_config if kind == "llm" else component_shapes.tower_from_config
        by_config = of_kind(config)
        assert by_config.parameters == pytest.approx(counted, rel=1e-9 if kind == "llm" else 0.02)
