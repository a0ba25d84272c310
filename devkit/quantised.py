"""A checkpoint's language model in 8 bits, as llm-compressor publishes it; its tower left alone."""

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
    """`source` with int8 weights, one scale an output channel, in its decoder layers. Returns `path`.

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


def _is_decoder(name: str) -> bool:
    return "vision_tower" not in name and "visual" not in name
