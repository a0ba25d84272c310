"""Loading of a module's weights from a checkpoint's safetensors. Only the module's own tensors are read.

Modules are built on the meta device, so an LLM or unused layers never take memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cornplug.errors import CheckpointError

_NAMED = 5


def fill(
    module: nn.Module,
    located: dict[str, tuple[Path, str]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Load every parameter of `module` from the locations that `Checkpoint.locate` found.

    `located` maps normalised names to (file, name in the file). `unused` returns whether the module does not
    need a tensor (layers after the cut). Raises CheckpointError "bad_tensors" with the names of missing,
    unknown or mismatched tensors, and "unreadable" for a bad file.
    """
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - located.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}", reason="bad_tensors")
    unexpected = sorted(name for name in located.keys() - wanted.keys() if not unused(name))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has unknown tensors: {_some(unexpected)}", reason="bad_tensors"
        )
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name in wanted:
        file, stored = located[name]
        by_file[file].append((name, stored))
    loaded: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        loaded.update(_read(file, names, dtype, device))
    wrong = [
        f"{name} {tuple(loaded[name].shape)} for {tuple(wanted[name].shape)}"
        for name in wanted
        if loaded[name].shape != wanted[name].shape
    ]
    if wrong:
        raise CheckpointError(f"shapes do not match config.json: {_some(wrong)}", reason="bad_tensors")
    module.load_state_dict(loaded, assign=True)
    module.eval().requires_grad_(False)


def _read(
    file: Path, names: list[tuple[str, str]], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name, stored in names:
                tensor = tensors.get_tensor(stored)
                if not tensor.is_floating_point():
                    raise CheckpointError(
                        f"{stored} is {tensor.dtype}: quantised towers and projectors are not supported",
                        reason="bad_tensors",
                    )
                out[name] = tensor.to(device=device, dtype=dtype, copy=True)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
    return out


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
