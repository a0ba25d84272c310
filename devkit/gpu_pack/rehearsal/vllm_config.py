"""What vLLM takes on the pretended GPU: platform, runner, attention backend; and cornplug beside it."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

_IMPORTED = (
    "cornplug.encoder_service.server",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


def main() -> int:
    """Print what is taken; 1 unless it is what a GPU machine should take."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from cornplug.vllm_connector import plugin
    from devkit.checkpoints import qwen2_text

    for name in _IMPORTED:
        importlib.import_module(name)
    load_general_plugins()
    found = {
        "platform": type(current_platform).__name__,
        "GPU": current_platform.get_device_name(),
        "cornplug": plugin.disabled_reason() or plugin.is_registered(),
        "FlashAttention": get_flash_attn_version(),
    }
    with tempfile.TemporaryDirectory() as name:
        args = AsyncEngineArgs(model=str(qwen2_text(Path(name))), dtype="bfloat16", max_model_len=2048)
        config = args.create_engine_config()
        found |= {"V2": config.use_v2_model_runner, "asynchronous": config.scheduler_config.async_scheduling}
    for what, value in found.items():
        print(f"rehearse-gpu: vLLM, {what}: {value}")
    wanted = {"platform": "NvmlCudaPlatform", "cornplug": True, "FlashAttention": 3, "V2": True}
    return int(any(found[what] != value for what, value in wanted.items()))


if __name__ == "__main__":
    sys.exit(main())
