"""vLLM's own audio models, as a program: processed audio -> its embeddings of them.

    python engine_audio.py OUT.safetensors IN.safetensors NAME=CHECKPOINT ...

IN holds `NAME/i/FIELD`, the inputs of audio item i as our readers make them; OUT gets `NAME/i/=`. Ultravox's
processor is remote code, which nobody here runs: so its model is given our inputs.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model


def engine_config(path: str) -> VllmConfig:
    return EngineArgs(
        model=path, dtype="float32", max_model_len=2048, enforce_eager=True, mm_processor_cache_gb=0
    ).create_engine_config()


def arguments(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As vLLM batches one audio item."""
    if "audio_lens" not in fields:
        return fields
    lens = fields["audio_lens"]
    return {
        **fields,
        "audio_token_len": -(-lens // 16),
        "audio_num_chunks": torch.tensor([len(lens)]),
    }


def main(out: str, given: str, *cases: str) -> None:
    inputs, found = load_file(given), {}
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    with tempfile.NamedTemporaryFile() as rendezvous:
        for number, case in enumerate(cases):
            name, _, path = case.partition("=")
            config = engine_config(path)
            with set_current_vllm_config(config):
                if number == 0:
                    init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
                    initialize_model_parallel(1, 1)
                model = get_model(vllm_config=config)
                for i in sorted({key.split("/")[1] for key in inputs if key.startswith(f"{name}/")}):
                    prefix = f"{name}/{i}/"
                    fields = {k.removeprefix(prefix): t for k, t in inputs.items() if k.startswith(prefix)}
                    with torch.inference_mode():
                        (embedding,) = model.embed_multimodal(**arguments(fields))
                    found[f"{prefix}="] = embedding.contiguous()
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
