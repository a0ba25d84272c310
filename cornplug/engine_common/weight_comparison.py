"""Comparison of the weights in an engine's memory with the files from which the model's identity is computed.

A different process fingerprints the files after the engine has read them. When a model is loaded, small
tensors that are not split across ranks and not changed by quantisation (norms) are compared with the files.
This detects a folder that was rewritten in between, and a loader that reads other files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.checkpoints.families import FAMILIES
from cornplug.engine_common import weights_guard
from cornplug.errors import CheckpointError

_LARGEST_BYTES: Final = 1 << 20
_TORCH: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check(model: torch.nn.Module, identified: Callable[[], Checkpoint], log: logging.Logger) -> None:
    """End sharing in all processes of this engine if the loaded weights differ from the checkpoint's files.

    `identified` returns the model's checkpoint. If it raises CheckpointError, the engine does not share
    anyway.
    """
    try:
        checkpoint = identified()
        name, compared = differing(model, checkpoint)
    except CheckpointError as e:
        log.debug("cornplug: did not compare loaded weights: %s", e)
        return
    if name is not None:
        weights_guard.end_sharing(f"{name} in memory differs from {checkpoint.path}", log)
    else:
        log.debug("cornplug: %d tensors in memory match the files", compared)


def differing(model: torch.nn.Module, checkpoint: Checkpoint) -> tuple[str | None, int]:
    """Return (name of the first norm in memory that differs from its file or None, number of compared
    tensors).

    A tensor from the files is compared if its name is the suffix of exactly one parameter's name and both
    shapes are equal. Raises CheckpointError.
    """
    by_end: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for start in range(len(parts)):
            by_end.setdefault(".".join(parts[start:]), []).append(parameter)
    compared = 0
    for name, file, entry in _norms(checkpoint):
        found = by_end.get(name, [])
        if len(found) != 1 or tuple(found[0].shape) != tuple(entry.shape) or found[0].is_meta:
            continue
        compared += 1
        here = found[0].detach().cpu()
        if not torch.equal(_read(file, entry).to(here.dtype), here):
            return name, compared
    return None, compared


def _norms(checkpoint: Checkpoint) -> Iterator[tuple[str, Path, Any]]:
    known = str(checkpoint.config.get("model_type")) in FAMILIES
    parts: tuple[Part, ...] = ("language_model", "tower") if known else ("language_model",)
    for part in parts:
        for name, file, entry in checkpoint.tensors(part):
            small = len(entry.shape) == 1 and entry.size_bytes <= _LARGEST_BYTES
            if small and "norm" in name and name.endswith(".weight") and entry.dtype in _TORCH:
                yield name, file, entry


def _read(file: Path, entry: Any) -> torch.Tensor:
    try:
        with file.open("rb") as f:
            f.seek(entry.offset)
            data = bytearray(f.read(entry.size_bytes))
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}.", reason="unreadable") from e
    return torch.frombuffer(data, dtype=_TORCH[entry.dtype])
