"""What SGLang takes on the pretended GPU, with the flags of the benchmarks; and cornplug's hooks in it."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

_IMPORTED = (
    "sgl_kernel",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.mem_cache.hicache_storage",
)


def main() -> int:
    """Print what is taken. Raises where a module does not import or a flag is refused."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from devkit.checkpoints import qwen2_text

    flags_on_gpu = importlib.import_module("gpu_sections.sides").GPU_SGLANG
    for name in _IMPORTED:
        importlib.import_module(name)
    load_plugins()
    with tempfile.TemporaryDirectory() as name:
        model = str(qwen2_text(Path(name), dtype="bfloat16"))
        flags = ["--model-path", model, *flags_on_gpu, "--enable-cornplug"]
        args = prepare_server_args(flags)
        args.resolve_once()
        found = args.resolved_dict()
    for what in ("device", "attention_backend", "sampling_backend", "hicache_storage_backend"):
        print(f"rehearse-gpu: SGLang, {what}: {found[what]}")
    return int(found["device"] != "cuda" or not found["enable_hierarchical_cache"])


if __name__ == "__main__":
    sys.exit(main())
