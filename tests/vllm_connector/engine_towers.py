"""vLLM's own model classes, as a program: images -> their processed inputs, and its embeddings of them.

    python engine_towers.py OUT.safetensors NAME=CHECKPOINT ...

One process loads one model after another, on the CPU, in float32. Of item i of NAME, it writes
`NAME/i/FIELD` for what `MediaInputs` sends to the encoder service and `NAME/i/=` for the embedding;
`NAME:alone/i/=` for that of a model without its language model (`--mm-encoder-only`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V1="1")

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from cornplug.vllm_connector.media.encoder_requests import MediaInputs

TEXT = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM")
SIZES = ((70, 60), (200, 90), (330, 340))


def images() -> list[Image.Image]:
    made = []
    for seed, size in enumerate(SIZES):
        small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
        made.append(Image.fromarray(small).resize(size))
    return made


def known_here(path: str) -> None:
    """Spare vLLM the process of its own in which it looks at each model class: seconds each time."""
    config = json.loads((Path(path) / "config.json").read_text())
    for name in (*config["architectures"], *TEXT):
        known = ModelRegistry.models[name]
        if not isinstance(known, _RegisteredModel):
            ModelRegistry.models[name] = _RegisteredModel.from_model_cls(known.load_model_cls())


def engine_config(path: str, *, alone: bool = False) -> VllmConfig:
    return EngineArgs(
        model=path,
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        limit_mm_per_prompt={"image": len(SIZES)},
        mm_processor_cache_gb=0,
        mm_encoder_only=alone,
    ).create_engine_config()


def processed(config: VllmConfig) -> list[Any]:
    """vLLM's item of each image, all of one prompt."""
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    items = processor.info.parse_mm_data({"image": images()})
    text = processor.dummy_inputs.get_dummy_text({"image": len(SIZES)})
    prompt = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    made = processor.apply(ProcessorInputs(prompt, items), TimingContext(enabled=False))
    return list(made["mm_kwargs"]["image"])


def embedded(config: VllmConfig, items: list[Any]) -> list[torch.Tensor]:
    """By vLLM's model, one item at a time as another batch may hold others."""
    model = get_model(vllm_config=config)
    out = []
    with torch.inference_mode():
        for item in items:
            ((_, _, kwargs),) = group_and_batch_mm_kwargs([("image", item)])
            (embedding,) = model.embed_multimodal(**kwargs)
            out.append(embedding)
    return out


def run(name: str, config: VllmConfig, found: dict[str, torch.Tensor]) -> None:
    with set_current_vllm_config(config):
        items = processed(config)
        inputs = MediaInputs(config)
        for i, (item, embedding) in enumerate(zip(items, embedded(config, items), strict=True)):
            for field, tensor in inputs.tower_inputs(SimpleNamespace(data=item, modality="image")).items():
                data = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
                found[f"{name}/{i}/{field}"] = data.reshape(tensor.shape)
            found[f"{name}/{i}/="] = embedding.contiguous()


def run_alone(name: str, config: VllmConfig, found: dict[str, torch.Tensor]) -> None:
    with set_current_vllm_config(config):
        for i, embedding in enumerate(embedded(config, processed(config))):
            found[f"{name}:alone/{i}/="] = embedding.contiguous()


def main(out: str, *cases: str) -> None:
    found: dict[str, torch.Tensor] = {}
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    with tempfile.NamedTemporaryFile() as rendezvous:
        for number, case in enumerate(cases):
            name, _, path = case.partition("=")
            known_here(path)
            config = engine_config(path)
            if number == 0:
                with set_current_vllm_config(config):
                    init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
                    initialize_model_parallel(1, 1)
            run(name, config, found)
            run_alone(name, engine_config(path, alone=True), found)
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
