"""`python vllm_videos.py GROUP_FILE MODEL ...`: one video through vLLM's own tower and through ours.

In a separate process, for vLLM wants a process group. Prints a line of JSON for each model:
[shape of the embedding, largest difference].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes

CPU = torch.device("cpu")
GRID = (3, 8, 4)


def main(group_file: str, models: list[str]) -> None:
    torch.set_num_threads(1)
    # What vLLM's CPU worker does as well: there is no accelerator whose cache could be emptied.
    torch.accelerator.empty_cache = lambda: None
    for path in models:
        config = EngineArgs(
            model=path, dtype="float32", max_model_len=512, enforce_eager=True
        ).create_engine_config()
        with set_current_vllm_config(config):
            if path == models[0]:
                init_distributed_environment(1, 0, f"file://{group_file}", 0, backend="gloo")
                ensure_model_parallel_initialized(1, 1)
            print(json.dumps(compare(get_model(vllm_config=config), path, config)), flush=True)


def compare(model: Any, path: str, config: VllmConfig) -> tuple[list[int], float]:
    """vLLM leaves normalising to the device, so its pixels are raw; ours are normalised by its norm."""
    t, h, w = GRID
    values = 6 * int(config.model_config.hf_config.vision_config.patch_size) ** 2
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (t * h * w, values), dtype=torch.uint8)
    grid = torch.tensor([GRID])
    with torch.inference_mode(), set_forward_context(None, config):
        (theirs,) = model.embed_multimodal(pixel_values_videos=raw, video_grid_thw=grid)
        normal = model.visual.input_norm.forward_native(raw, torch.float32)
    checkpoint = Checkpoint.open(path)
    architecture = towers.find_architecture(checkpoint.family)
    tower = architecture.load_tower(checkpoint, torch.float32, CPU)
    projector = architecture.load_projector(checkpoint, torch.float32, CPU)
    item = tower.prepare({"pixel_values_videos": wire(normal), "video_grid_thw": wire(grid)})
    (ours,) = projector.project(tower.encode([item]), [item])
    if ours.shape != theirs.shape:
        raise SystemExit(f"{tuple(ours.shape)}, vLLM has {tuple(theirs.shape)}")
    return list(theirs.shape), float((ours - theirs).abs().max())


def wire(tensor: torch.Tensor) -> WireTensor:
    return WireTensor(
        dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=bytes(raw_bytes(tensor))
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
