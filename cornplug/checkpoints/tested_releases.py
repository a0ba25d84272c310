"""Engine releases and model families with which cornplug was tested.

`VALIDATED` lists the families whose embeddings a test compared, by engine, release and dtype.

script/docs writes the rows of `VALIDATED` from docs/support-matrix.json, which contains the results of
tests/integration/test_families.py, test_family_videos.py and test_own_towers.py.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
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
"""(engine, release, dtype, kind, `model_type`) of each family that passed the test on at least one machine
and failed it on none.

Embeddings of the kinds "image" and "video" are shared by all engines and the encoder service. Embeddings of
the kinds "own image", "own video" and "own audio" are shared only among servers of the same engine.
"""


def compared_families(engine: str, version: str | None, dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the families that a test compared in this release of an engine with this dtype.

    Args:
        engine: "vllm" or "sglang".
        version: Installed version, or None. Its local part ("+cpu") is ignored.
        dtype: torch's name without "torch.".
        kind: Kind of embedding, as in `VALIDATED`.
    """
    release = (version or "").partition("+")[0]
    return frozenset(family for *place, family in VALIDATED if place == [engine, release, dtype, kind])


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Half-open range of versions of one engine, from `low` up to but not including `high`."""

    engine: str
    """Name of the engine, for messages."""
    package: str
    """Name of the engine's distribution package."""
    low: tuple[int, ...]
    high: tuple[int, ...]
    """Upper bound (exclusive). Has as many numbers as `low`. Further numbers in a version are ignored."""

    def __str__(self) -> str:
        """Format the range like pip: ">=0.32,<0.33"."""
        low, high = (".".join(map(str, bound)) for bound in (self.low, self.high))
        return f">={low},<{high}"

    def __contains__(self, version: str) -> bool:
        found = re.match(r"\.".join([r"(\d+)"] * len(self.low)), version)
        return found is not None and self.low <= tuple(map(int, found.groups())) < self.high

    def installed_version(self) -> str | None:
        """Return the version of the installed engine, or None if it is not installed. Does not import the
        engine.
        """
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def explain_mismatch(self) -> str:
        """Return the reason why cornplug does not run with the installed engine, or "" if the engine's
        version is in the range."""
        version = self.installed_version()
        if version is not None and version in self:
            return ""
        found = f"{self.engine} {version}"
        return f"{found} is outside the tested range {self}; install a release of cornplug that supports it"
