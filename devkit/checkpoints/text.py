"""Tiny language models without a tower."""

from __future__ import annotations

import json
from pathlib import Path

from devkit.checkpoints.parts import (
    Text,
    make_folder,
    qwen2_tokenizer,
    token_ids,
    write_json,
    write_tensors,
    write_weights,
)


def qwen2_text(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A Qwen2 without a tower. Returns `path`."""
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("qwen2", ids)
    config = {
        **text,
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1e6,
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "Qwen2ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder


def qwen2_eagle(
    path: Path | str,
    *,
    hidden_size: int = 64,
    heads: int = 2,
    llm_seed: int = 5,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """An EAGLE draft for a `qwen2_text` of the same width, as SGLang reads it. Returns `path`.

    One layer without a first norm, and a map of a token's embedding beside the model's hidden state.
    """
    folder = qwen2_text(
        path, hidden_size=hidden_size, layers=1, heads=heads, max_positions=max_positions, dtype=dtype
    )
    config = json.loads((folder / "config.json").read_text())
    write_json(folder, config={**config, "architectures": ["Qwen2ForCausalLMEagle"]})
    from safetensors.torch import load_file

    shapes = {
        name.removeprefix("model."): tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ".layers." in name and "input_layernorm" not in name
    }
    shapes |= {"fc.weight": (hidden_size, 2 * hidden_size), "fc.bias": (hidden_size,)}
    write_tensors(folder, shapes, {"": llm_seed}, {}, dtype)
    return folder


def qwen3_5_text(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 4,
    heads: int = 2,
    linear_heads: int = 2,
    head_dim: int = 64,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "bfloat16",
) -> Path:
    """A Qwen3.5 without a tower: gated delta nets, which keep a state, and full attention in each fourth
    layer. Returns `path`."""
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(hidden_size, layers, heads, None, None, max_positions).config("qwen3_5_text", ids)
    linear = {"num_key_heads": linear_heads, "num_value_heads": linear_heads, "conv_kernel_dim": 4}
    config = {
        **text,
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": head_dim,
        **{f"linear_{name}": value for name, value in linear.items()},
        **{"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim},
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "Qwen3_5ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    forget_slowly(folder)
    return folder


def mellum(
    path: Path | str,
    *,
    window: int = 128,
    hidden_size: int = 64,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 32,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A Mellum 2 of dense layers: a window of so many tokens in all layers but the last, which sees all.
    SGLang keeps the two kinds in pools of their own. Returns `path`."""
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(hidden_size, layers, heads, None, None, max_positions).config("mellum", ids)
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    config = {
        **text,
        "architectures": ["MellumForCausalLM"],
        "head_dim": head_dim,
        "sliding_window": window,
        "layer_types": kinds,
        # Experts are declared, as the config class wants, and no layer has them.
        **{"mlp_layer_types": ["dense"] * layers, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": hidden_size, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "MellumForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder


def forget_slowly(folder: Path) -> None:
    """Let a checkpoint's states, if it has any, last for hundreds of tokens: drawn as other tensors are,
    they would last for two."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    slow = {name: tensor - 6 for name, tensor in tensors.items() if name.endswith("A_log")}
    save_file(tensors | slow, folder / "model.safetensors", metadata={"format": "pt"})


def deepseek_v2(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_lora_rank: int = 64,
    rope_dim: int = 32,
    head_dim: int = 32,
    llm_seed: int = 1,
    max_positions: int = 4096,
    version: int = 2,
    dtype: str = "float32",
) -> Path:
    """A DeepSeek-V2 of dense layers: multi-head latent attention (MLA). Returns `path`.

    An engine caches `kv_lora_rank + rope_dim` numbers per token and layer, independent of `heads`.
    `version` 3 is DeepSeek-V3, which compresses queries too.
    """
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(hidden_size, layers, heads, None, None, max_positions).config(f"deepseek_v{version}", ids)
    architecture = f"DeepseekV{version}ForCausalLM"
    queries = hidden_size // 2 if version == 3 else None
    # SGLang's CPU path takes no other rope than the published one.
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": max_positions // 4}
    config = {
        **text,
        "architectures": [architecture],
        **{"q_lora_rank": queries, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": rope_dim},
        **{"qk_nope_head_dim": head_dim, "v_head_dim": head_dim},
        # Experts are declared, as the config class wants, and start after the last layer.
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": layers, "moe_layer_freq": 1, "moe_intermediate_size": hidden_size},
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"},
        **({"topk_method": "noaux_tc", "scoring_func": "sigmoid"} if version == 3 else {}),
        **({"num_nextn_predict_layers": 0} if version == 3 else {}),
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "attention_bias": False},
        "rope_theta": 1e4,
        "rope_scaling": {**rope, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, architecture, lambda name: name, {"": llm_seed}, ids, dtype)
    return folder
