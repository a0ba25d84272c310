"""Tiny language models without a tower."""

from __future__ import annotations

from pathlib import Path

from devkit.checkpoints.parts import Text, make_folder, qwen2_tokenizer, token_ids, write_json, write_weights


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
    dtype: str = "float32",
) -> Path:
    """A DeepSeek-V2 of dense layers: multi-head latent attention (MLA). Returns `path`.

    An engine caches `kv_lora_rank + rope_dim` numbers per token and layer, independent of `heads`.
    """
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(hidden_size, layers, heads, None, None, max_positions).config("deepseek_v2", ids)
    # SGLang's CPU path takes no other rope than the published one.
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": max_positions // 4}
    config = {
        **text,
        "architectures": ["DeepseekV2ForCausalLM"],
        **{"q_lora_rank": None, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": rope_dim},
        **{"qk_nope_head_dim": head_dim, "v_head_dim": head_dim},
        # Experts are declared, as the config class wants, and start after the last layer.
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": layers, "moe_layer_freq": 1, "moe_intermediate_size": hidden_size},
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "attention_bias": False},
        "rope_theta": 1e4,
        "rope_scaling": {**rope, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "DeepseekV2ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder
