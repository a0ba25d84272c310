"""Checkpoints with random weights at sizes worth timing, written once and kept.

They lie below cornplug's cache folder, named by their parameters; delete the folder to free
the space. Half-written ones are never used: each is written beside and renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cornplug.private_paths import cache_dir
from devkit import checkpoints
from driver import repeated_layers


def llava(**parameters: Any) -> Path:
    """The folder of a LLaVA-1.5 with these parameters of `devkit.checkpoints.llava`."""
    return _made("llava", checkpoints.llava, parameters)


def qwen2_vl(**parameters: Any) -> Path:
    """The folder of a Qwen2-VL with these parameters of `devkit.checkpoints.qwen2_vl`."""
    return _made("qwen2-vl", checkpoints.qwen2_vl, parameters)


def qwen2_5_vl(**parameters: Any) -> Path:
    """The folder of a Qwen2.5-VL with these parameters of `devkit.checkpoints.qwen2_5_vl`."""
    return _made("qwen2-5-vl", checkpoints.qwen2_5_vl, parameters)


def qwen2_text(**parameters: Any) -> Path:
    """The folder of a Qwen2 without a tower with these parameters of `devkit.checkpoints.qwen2_text`."""
    return _made("qwen2-text", checkpoints.qwen2_text, parameters)


def large_qwen2_text(**parameters: Any) -> Path:
    """The folder of a Qwen2 of equal layers with these parameters of `driver.repeated_layers.qwen2_text`."""
    return _made("large-qwen2-text", repeated_layers.qwen2_text, parameters)


def _made(family: str, make: Callable[..., Path], parameters: dict[str, Any]) -> Path:
    text = json.dumps(parameters, sort_keys=True)
    name = f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder = cache_dir() / "bench-models" / name
    if not folder.exists():
        draft = folder.with_name(f".{name}.{os.getpid()}")
        make(draft, **parameters)
        (draft / "parameters.json").write_text(text + "\n")
        try:
            draft.rename(folder)
        except OSError:  # another benchmark was first: its folder is as good
            shutil.rmtree(draft)
    return folder
