"""Tiny language models whose layers do not all keep KV alike: windows, chunks, shared caches, states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devkit.checkpoints.parts import Text, make_folder, qwen2_tokenizer, token_ids, write_json, write_weights
from devkit.checkpoints.text import forget_slowly

_HIDDEN: Final = 64
_HEADS: Final = 2
_HEAD_DIM: Final = 32


def gpt_oss(path: Path | str, *, layers: int = 2, window: int = 128) -> Path:
    """A GPT-OSS of four experts: attention sinks, and a window in every other layer. Returns `path`.

    vLLM's chat API speaks another format for it, whose vocabulary it downloads: ask for completions.
    """
    yarn = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "truncate": False}
    return _text(
        path,
        "GptOssForCausalLM",
        layers,
        {
            **{"head_dim": _HEAD_DIM, "sliding_window": window, "attention_bias": True},
            "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": _HIDDEN},
            "rope_parameters": {
                **yarn,
                **{"original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
        model_type="gpt_oss",
    )


def llama_windowed(path: Path | str, *, windows: int, full: int, window: int = 256) -> Path:
    """A Llama whose first layers see a window and whose last `full` ones see all. Returns `path`.

    Its weights depend on the number of layers only: one without windows drafts well for one with them.
    """
    return _text(
        path,
        "LlamaForCausalLM",
        windows + full,
        {
            **{"head_dim": _HEAD_DIM, "sliding_window": window},
            "layer_types": ["sliding_attention"] * windows + ["full_attention"] * full,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        model_type="llama",
    )


def llama4_text(path: Path | str, *, layers: int = 2, chunk: int = 256) -> Path:
    """A Llama 4 without a tower, of dense layers: every other one attends to its chunk. Returns `path`."""
    return _text(
        path,
        "Llama4ForCausalLM",
        layers,
        {
            **{"head_dim": _HEAD_DIM, "attention_chunk_size": chunk, "no_rope_layer_interval": 2},
            **{"use_qk_norm": True, "intermediate_size_mlp": 2 * _HIDDEN},
            # The first layer of experts would come after the last layer.
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 100},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        model_type="llama4_text",
    )


def gemma3n_text(path: Path | str, *, shared: int = 2, window: int = 256) -> Path:
    """A Gemma 3n without towers: two layers with caches of their own, one of them with a window, then
    `shared` that read these caches. Returns `path`."""
    layers = 2 + shared
    return _text(
        path,
        "Gemma3nForCausalLM",
        layers,
        {
            **{"head_dim": _HEAD_DIM, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
            "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
            **{"sliding_window": window, "num_kv_shared_layers": shared, "laurel_rank": 8},
            **{"altup_num_inputs": 2, "hidden_size_per_layer_input": 16},
        },
        model_type="gemma3n_text",
        per_layer_vocabulary=True,
    )


def lfm2(path: Path | str, *, layers: int = 4) -> Path:
    """An LFM2: short convolutions, which keep two inputs as a state, and full attention in each fourth
    layer. Returns `path`."""
    return _text(
        path,
        "Lfm2ForCausalLM",
        layers,
        {
            **{"block_dim": _HIDDEN, "conv_dim": _HIDDEN, "conv_dim_out": _HIDDEN, "conv_L_cache": 3},
            **{"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "tie_word_embeddings": True},
            "layer_types": ["full_attention" if i % 4 == 3 else "conv" for i in range(layers)],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        model_type="lfm2",
    )


def falcon_h1(path: Path | str, *, layers: int = 2) -> Path:
    """A Falcon-H1: each layer has full attention and, beside it, a Mamba 2 with a state. Returns `path`."""
    return _text(
        path,
        "FalconH1ForCausalLM",
        layers,
        {
            **{"mamba_d_ssm": _HIDDEN, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1},
            **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 64, "mamba_expand": 1},
            # States sum up hundreds of tokens, and would drown attention.
            "ssm_out_multiplier": 0.125,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        model_type="falcon_h1",
    )


def mamba2(path: Path | str, *, layers: int = 2) -> Path:
    """A Mamba 2: states alone. Returns `path`."""
    return _text(
        path,
        "Mamba2ForCausalLM",
        layers,
        {
            **{"expand": 2, "num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
            **{"conv_kernel": 4, "chunk_size": 64, "layer_norm_epsilon": 1e-5},
        },
        model_type="mamba2",
    )


def _text(
    path: Path | str,
    architecture: str,
    layers: int,
    fields: Mapping[str, Any],
    *,
    model_type: str,
    per_layer_vocabulary: bool = False,
) -> Path:
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    text = Text(_HIDDEN, layers, _HEADS, None, None, 4096).config(model_type, ids)
    if per_layer_vocabulary:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    config = {
        **text,
        "architectures": [architecture],
        **fields,
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": "float32",
    }
    write_json(folder, config=config)
    write_weights(folder, architecture, lambda name: name, {"": 1}, ids, "float32")
    forget_slowly(folder)
    return folder
