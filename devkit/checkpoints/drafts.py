"""Heads that draft for a tiny language model from its hidden states. They are drawn, and seldom right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from devkit.checkpoints.parts import draw, make_folder


def eagle_head(path: Path | str, target: Path, *, seed: int = 7) -> Path:
    """An EAGLE head of one Llama layer for the model in the folder `target`, whose embeddings and head it
    uses. Returns `path`."""
    folder, config = _folder(path, target)
    width, inner, keys = _widths(config)
    shapes = {
        "fc.weight": (width, 2 * width),
        "layers.0.self_attn.q_proj.weight": (width, width),
        "layers.0.self_attn.k_proj.weight": (keys, width),
        "layers.0.self_attn.v_proj.weight": (keys, width),
        "layers.0.self_attn.o_proj.weight": (width, width),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    return _written(folder, config, shapes, seed)


def eagle3_head(path: Path | str, target: Path, *, seen: Sequence[int], seed: int = 7) -> Path:
    """An EAGLE-3 head, which sees the hidden states before the layers `seen` of the target, and uses its
    embeddings. Returns `path`."""
    folder, config = _folder(path, target)
    width, inner, keys = _widths(config)
    of_tokens = config["vocab_size"]
    config |= {
        **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": of_tokens},
        "eagle_aux_hidden_state_layer_ids": list(seen),
        "num_aux_hidden_states": len(seen),
    }
    shapes = {
        "fc.weight": (width, len(seen) * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "midlayer.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (of_tokens, width),
    }
    return _written(folder, config, shapes, seed)


def _folder(path: Path | str, target: Path) -> tuple[Path, dict[str, Any]]:
    """The folder, and the config of one Llama layer of the target's sizes."""
    config = _config(target)
    copied = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("max_position_embeddings", "rms_norm_eps", "hidden_act", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    head = {
        **{name: config[name] for name in copied},
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1},
        **{"tie_word_embeddings": False, "rope_theta": 1e4},
    }
    return make_folder(path), head


def _widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(hidden state, MLP, keys)."""
    width = config["hidden_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    return width, config["intermediate_size"], keys


def _written(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Path:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: draw(name, shape, seed) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
