"""Families that a test has compared in each engine.

Written by script/docs from docs/support-matrix.json, where runs of tests/integration/test_families.py,
tests/integration/test_family_videos.py and tests/integration/test_own_towers.py keep their results: a family
is here if it passed, and failed in no release and on no bed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VALIDATED: Final[Mapping[str, frozenset[str]]] = {
    "sglang": frozenset(
        {
            "glm4v",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
        }
    ),
    "vllm": frozenset(
        {
            "gemma3",
            "internvl",
            "llava",
            "llava_next",
            "llava_onevision",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
        }
    ),
}
"""Engine -> `model_type`s."""
VALIDATED_OF_VIDEO: Final[Mapping[str, frozenset[str]]] = {
    "sglang": frozenset(),
    "vllm": frozenset(
        {
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
        }
    ),
}
"""Engine -> `model_type`s whose videos were compared."""
VALIDATED_OWN: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "sglang": {
        "audio": frozenset(
            {
                "qwen2_audio",
            }
        ),
        "image": frozenset(
            {
                "gemma3",
                "internvl_chat",
            }
        ),
        "video": frozenset(),
    },
}
"""Engine -> modality -> `model_type`s whose embeddings its servers share among themselves."""
