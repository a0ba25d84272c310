"""`python vllm_tower.py MODEL`: a picture and a video through vLLM's own tower and through ours.

In a process of its own, for vLLM wants a process group. Prints, as JSON, [shape, largest difference] of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.protocol import Tensor
from cornplug.encoder_service.towers.tensors import dtype_name, raw_bytes

CPU = torch.device("cpu")
GRIDS = {"image": (1, 4, 6), "video": (3, 8, 4)}
NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def main(path: Path, store: Path) -> None:
    config = EngineArgs(
        model=str(path), dtype="float32", max_model_len=512, enforce_eager=True
    ).create_engine_config()
    torch.set_num_threads(1)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        # What vLLM's CPU worker does as well: there is no accelerator whose cache could be emptied.
        torch.accelerator.empty_cache = lambda: None
        model = get_model(vllm_config=config)
        found = [compare(model, path, config, modality) for modality in GRIDS]
    print(json.dumps(found))


def compare(model: Any, path: Path, config: VllmConfig, modality: str) -> tuple[list[int], float]:
    """As vLLM leaves it to the device, pixels are raw; ours are those that its norm makes of them."""
    t, h, w = GRIDS[modality]
    pixels, grid = NAMES[modality]
    values = 6 * int(config.model_config.hf_config.vision_config.patch_size) ** 2
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (t * h * w, values), dtype=torch.uint8)
    with torch.inference_mode(), set_forward_context(None, config):
        (theirs,) = model.embed_multimodal(**{pixels: raw, grid: torch.tensor([[t, h, w]])})
        normal = model.visual.input_norm.forward_native(raw, torch.float32)
    checkpoint = Checkpoint.open(str(path))
    architecture = towers.architecture(checkpoint.family)
    tower = architecture.load_tower(checkpoint, torch.float32, CPU)
    projector = architecture.load_projector(checkpoint, torch.float32, CPU)
    item = tower.prepare({pixels: wire(normal), grid: wire(torch.tensor([t, h, w]))})
    (ours,) = projector.project(tower.encode([item]), [item])
    if ours.shape != theirs.shape:
        raise SystemExit(f"{modality}: {tuple(ours.shape)}, vLLM has {tuple(theirs.shape)}")
    return list(theirs.shape), float((ours - theirs).abs().max())


def wire(tensor: torch.Tensor) -> Tensor:
    return Tensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=bytes(raw_bytes(tensor)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
