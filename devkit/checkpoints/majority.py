"""A language model, and an EAGLE-3 head for it, that both say the most frequent token so far.

Attention without scores averages what the KV cache holds, so a head whose cache lacks a prefix, or holds
another request's, proposes another token than the model: its accepted proposals count its right KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from devkit.checkpoints.drafts import eagle3_head
from devkit.checkpoints.hybrids import llama_windowed

if TYPE_CHECKING:
    import torch

_LOUD: Final = 100.0
"""The average beside the last token's own embedding."""


def majority(path: Path | str, *, windows: int, full: int) -> Path:
    """A Llama of `windows` layers with a window and `full` ones without, the last of which decides.
    Returns `path`."""
    from torch.nn.functional import normalize

    folder = llama_windowed(path, windows=windows, full=full)
    tensors = _load(folder)
    tokens = normalize(tensors["model.embed_tokens.weight"].float(), dim=1)
    _average(tensors, last=f"model.layers.{windows + full - 1}.")
    tensors |= {name: tokens.clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    _save(folder, tensors)
    return folder


def majority_head(path: Path | str, target: Path, *, seen: Sequence[int]) -> Path:
    """The head for a `majority` model, in `eagle3_head`'s form. Returns `path`."""
    folder = eagle3_head(path, target, seen=seen)
    tensors = _load(folder)
    _average(tensors, last="midlayer.")
    tensors["fc.weight"].zero_()  # the target's hidden states say nothing
    tensors["lm_head.weight"] = _load(target)["lm_head.weight"]
    _save(folder, tensors)
    return folder


def _average(tensors: Mapping[str, torch.Tensor], *, last: str) -> None:
    """Let the layer `last` add the average of the embeddings in its cache, and the others nothing."""
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")) or name.startswith(last + "self_attn"):
            tensor.zero_()
    for part, value in ("v_proj", 1.0), ("o_proj", _LOUD):
        tensors[f"{last}self_attn.{part}.weight"].fill_diagonal_(value)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
