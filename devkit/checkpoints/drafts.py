"""Heads that draft for a tiny language model from its hidden states. They are drawn, and seldom right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devkit.checkpoints.parts import draw, make_folder


def eagle_head(path: Path | str, target: Path, *, seed: int = 7) -> Path:
    """An EAGLE head of one Llama layer for the model in the folder `target`, whose embeddings and head it
    uses. Returns `path`."""
    from safetensors.torch import save_file

    folder, config = make_folder(path), _config(target)
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
    (folder / "config.json").write_text(json.dumps(head, indent=1))
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
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
    tensors = {name: draw(name, shape, seed) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
