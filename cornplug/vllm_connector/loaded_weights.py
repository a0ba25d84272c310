"""Whether the weights in a worker's memory are those of the files that its identity is read from.

The files are fingerprinted after vLLM has read them, by another process. Small tensors that no rank
splits and no quantisation touches (norms) are compared with the files as soon as a model is loaded: a
folder that was rewritten in between, or a loader that reads something else, shows in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from cornplug.checkpoint import Checkpoint, Part
from cornplug.errors import CheckpointError
from cornplug.families import FAMILIES
from cornplug.vllm_connector import compat, engine_state
from cornplug.vllm_connector.plugin import EC_CONNECTOR, KV_CONNECTOR

_LARGEST_BYTES: Final = 1 << 20
_TORCH: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def differing(model: torch.nn.Module, checkpoint: Checkpoint) -> tuple[str | None, int]:
    """(the first norm whose values are not those of its file, how many were compared).

    Of those that can be compared: a name of ours that ends the name of just one parameter, of the same
    shape. Raises CheckpointError.
    """
    by_end: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for start in range(len(parts)):
            by_end.setdefault(".".join(parts[start:]), []).append(parameter)
    compared = 0
    for name, file, entry in _norms(checkpoint):
        found = by_end.get(name, [])
        if len(found) != 1 or tuple(found[0].shape) != tuple(entry.shape):
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


def _load_model(original: Callable[..., Any], worker: Any, **kwargs: Any) -> Any:
    result = original(worker, **kwargs)
    config = worker.vllm_config
    if _ours(config) and not kwargs.get("load_dummy_weights"):
        _check(worker.model_runner.get_model(), config)
    return result


def _ours(config: Any) -> bool:
    kv, ec = config.kv_transfer_config, config.ec_transfer_config
    several = kv.kv_connector_extra_config.get("connectors") or () if kv is not None else ()
    names = [getattr(kv, "kv_connector", None), *(one.get("kv_connector") for one in several)]
    return KV_CONNECTOR in names or getattr(ec, "ec_connector", None) == EC_CONNECTOR


def _check(model: torch.nn.Module, config: Any) -> None:
    from cornplug.vllm_connector.verdicts import of_everything

    if of_everything(config).refusals:
        return  # nothing is shared, whatever was loaded
    described = config.model_config
    try:
        checkpoint = Checkpoint.open(
            described.model, described.revision, cache_dir=config.load_config.download_dir
        )
        name, compared = differing(model, checkpoint)
    except CheckpointError as e:
        compat.logger.debug("cornplug: loaded weights not compared: %s", e)
        return
    if name is not None:
        compat.logger.warning(
            "cornplug: %s in memory is not what %s holds; this engine shares nothing until restart",
            name,
            checkpoint.path,
        )
        engine_state.current().note_replaced()
    else:
        compat.logger.debug("cornplug: %d tensors in memory are those of the files", compared)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", _load_model),
)
