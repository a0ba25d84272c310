"""A checkpoint's language model, or its KV cache, in 8 bits, as llm-compressor publishes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

_SCHEME: Final[dict[str, Any]] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
    },
}  # fmt: skip
_KEPT: Final = ("re:.*visual.*", "re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*lm_head.*")


def quantised(source: Path, path: Path | str) -> Path:
    """`source` with int8 weights, one scale an output channel, in its decoder layers; its tower left alone.
    Returns `path`.

    The format is compressed-tensors' "int-quantized" (W8A8), which vLLM runs on a CPU too.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target = Path(shutil.copytree(source, path))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".layers." in name and name.endswith("_proj.weight") and _is_decoder(name):
            scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (weight.float() / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": _SCHEME},
        "ignore": list(_KEPT),
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def with_kv_scales(source: Path, path: Path | str, *, k_scale: float, v_scale: float) -> Path:
    """`source` with an fp8 KV cache of these scales, times 1 in the first layer, 2 in the next, and so on.
    Returns `path`."""
    import torch
    from safetensors.torch import load_file, save_file

    target = Path(shutil.copytree(source, path))
    tensors = load_file(source / "model.safetensors")
    layers = {name.rpartition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    for number, layer in enumerate(sorted(layers), 1):
        for plane, scale in (("k", k_scale), ("v", v_scale)):
            tensors[f"{layer}.self_attn.{plane}_scale"] = torch.tensor(scale * number)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def _is_decoder(name: str) -> bool:
    return "vision_tower" not in name and "visual" not in name
