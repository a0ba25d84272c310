"""Families whose results were compared in an engine by a test, by release and dtype.

script/docs writes these rows from docs/support-matrix.json. That file contains the results of
tests/integration/test_families.py, test_family_videos.py and test_own_towers.py.
"""

from __future__ import annotations

from typing import Final

VALIDATED: Final[frozenset[tuple[str, str, str, str, str]]] = frozenset(
    {
        ("sglang", "0.5.23", "bfloat16", "image", "glm4v"),
        ("sglang", "0.5.23", "bfloat16", "image", "qwen2_5_vl"),
        ("sglang", "0.5.23", "bfloat16", "image", "qwen2_vl"),
        ("sglang", "0.5.23", "bfloat16", "image", "qwen3_vl"),
        ("sglang", "0.5.23", "bfloat16", "image", "qwen3_vl_moe"),
        ("sglang", "0.5.23", "bfloat16", "own audio", "qwen2_audio"),
        ("sglang", "0.5.23", "bfloat16", "own image", "gemma3"),
        ("sglang", "0.5.23", "bfloat16", "own image", "internvl_chat"),
        ("sglang", "0.5.23", "float32", "image", "glm4v"),
        ("sglang", "0.5.23", "float32", "image", "qwen2_5_vl"),
        ("sglang", "0.5.23", "float32", "image", "qwen2_vl"),
        ("sglang", "0.5.23", "float32", "image", "qwen3_vl"),
        ("sglang", "0.5.23", "float32", "image", "qwen3_vl_moe"),
        ("sglang", "0.5.23", "float32", "own audio", "qwen2_audio"),
        ("sglang", "0.5.23", "float32", "own image", "gemma3"),
        ("sglang", "0.5.23", "float32", "own image", "internvl_chat"),
        ("vllm", "0.32.0", "bfloat16", "image", "gemma3"),
        ("vllm", "0.32.0", "bfloat16", "image", "internvl"),
        ("vllm", "0.32.0", "bfloat16", "image", "llava"),
        ("vllm", "0.32.0", "bfloat16", "image", "llava_next"),
        ("vllm", "0.32.0", "bfloat16", "image", "llava_onevision"),
        ("vllm", "0.32.0", "bfloat16", "image", "qwen2_5_vl"),
        ("vllm", "0.32.0", "bfloat16", "image", "qwen2_vl"),
        ("vllm", "0.32.0", "bfloat16", "image", "qwen3_vl"),
        ("vllm", "0.32.0", "bfloat16", "image", "qwen3_vl_moe"),
        ("vllm", "0.32.0", "bfloat16", "video", "qwen2_5_vl"),
        ("vllm", "0.32.0", "bfloat16", "video", "qwen2_vl"),
        ("vllm", "0.32.0", "bfloat16", "video", "qwen3_vl"),
        ("vllm", "0.32.0", "bfloat16", "video", "qwen3_vl_moe"),
        ("vllm", "0.32.0", "float16", "image", "llava"),
        ("vllm", "0.32.0", "float16", "image", "llava_next"),
        ("vllm", "0.32.0", "float16", "image", "llava_onevision"),
        ("vllm", "0.32.0", "float32", "image", "gemma3"),
        ("vllm", "0.32.0", "float32", "image", "internvl"),
        ("vllm", "0.32.0", "float32", "image", "llava"),
        ("vllm", "0.32.0", "float32", "image", "llava_next"),
        ("vllm", "0.32.0", "float32", "image", "llava_onevision"),
        ("vllm", "0.32.0", "float32", "image", "qwen2_5_vl"),
        ("vllm", "0.32.0", "float32", "image", "qwen2_vl"),
        ("vllm", "0.32.0", "float32", "image", "qwen3_vl"),
        ("vllm", "0.32.0", "float32", "image", "qwen3_vl_moe"),
        ("vllm", "0.32.0", "float32", "video", "qwen2_5_vl"),
        ("vllm", "0.32.0", "float32", "video", "qwen2_vl"),
        ("vllm", "0.32.0", "float32", "video", "qwen3_vl"),
        ("vllm", "0.32.0", "float32", "video", "qwen3_vl_moe"),
        ("vllm", "0.33.0", "bfloat16", "image", "gemma3"),
        ("vllm", "0.33.0", "bfloat16", "image", "internvl"),
        ("vllm", "0.33.0", "bfloat16", "image", "llava"),
        ("vllm", "0.33.0", "bfloat16", "image", "llava_next"),
        ("vllm", "0.33.0", "bfloat16", "image", "llava_onevision"),
        ("vllm", "0.33.0", "bfloat16", "image", "qwen2_5_vl"),
        ("vllm", "0.33.0", "bfloat16", "image", "qwen2_vl"),
        ("vllm", "0.33.0", "bfloat16", "image", "qwen3_vl"),
        ("vllm", "0.33.0", "bfloat16", "image", "qwen3_vl_moe"),
        ("vllm", "0.33.0", "bfloat16", "video", "qwen2_5_vl"),
        ("vllm", "0.33.0", "bfloat16", "video", "qwen2_vl"),
        ("vllm", "0.33.0", "bfloat16", "video", "qwen3_vl"),
        ("vllm", "0.33.0", "bfloat16", "video", "qwen3_vl_moe"),
        ("vllm", "0.33.0", "float16", "image", "llava"),
        ("vllm", "0.33.0", "float16", "image", "llava_next"),
        ("vllm", "0.33.0", "float16", "image", "llava_onevision"),
        ("vllm", "0.33.0", "float32", "image", "gemma3"),
        ("vllm", "0.33.0", "float32", "image", "internvl"),
        ("vllm", "0.33.0", "float32", "image", "llava"),
        ("vllm", "0.33.0", "float32", "image", "llava_next"),
        ("vllm", "0.33.0", "float32", "image", "llava_onevision"),
        ("vllm", "0.33.0", "float32", "image", "qwen2_5_vl"),
        ("vllm", "0.33.0", "float32", "image", "qwen2_vl"),
        ("vllm", "0.33.0", "float32", "image", "qwen3_vl"),
        ("vllm", "0.33.0", "float32", "image", "qwen3_vl_moe"),
        ("vllm", "0.33.0", "float32", "video", "qwen2_5_vl"),
        ("vllm", "0.33.0", "float32", "video", "qwen2_vl"),
        ("vllm", "0.33.0", "float32", "video", "qwen3_vl"),
        ("vllm", "0.33.0", "float32", "video", "qwen3_vl_moe"),
    }
)
"""(engine, release, dtype, kind, `model_type`) of each family that passed, and failed on no bed.

The kinds "image" and "video" are of media that all engines and the encoder service share. "own image",
"own video" and "own audio" are of media that the servers of one engine share among themselves.
"""


def validated(engine: str, version: str | None, dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the families that were compared in this release of an engine with this dtype.

    Args:
        engine: "vllm" or "sglang".
        version: Installed version. Its local part ("+cpu") does not count.
        dtype: torch's name without "torch.".
        kind: As in `VALIDATED`.
    """
    release = (version or "").partition("+")[0]
    return frozenset(family for *place, family in VALIDATED if place == [engine, release, dtype, kind])
