"""Which model this engine runs, as identities: read from its checkpoint, never from its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornplug.checkpoint import Checkpoint
from cornplug.errors import CheckpointError
from cornplug.identity import digest, model_identity, overridden, spec_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Weights that these formats load are not the checkpoint's safetensors.
_UNVERIFIABLE_FORMATS = frozenset(
    {"dummy", "pt", "npcache", "gguf", "tensorizer", "runai_streamer_sharded", "sharded_state"}
)


@dataclass(frozen=True, slots=True)
class TowerIdentity:
    """What this engine's embeddings are computed from."""

    identity: bytes
    """32 bytes; part of every embedding key."""
    served_identity: bytes | None
    """The identity that an encoder service would list for this model; None where only this
    very model's engines can share (unknown family, or settings that the service lacks)."""


def dtype_name(dtype: Any) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def open_checkpoint(config: VllmConfig) -> Checkpoint:
    """The engine's checkpoint on disk. Raises CheckpointError where it cannot be what runs."""
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if load_format in _UNVERIFIABLE_FORMATS:
        raise CheckpointError(
            f"load format {load_format!r} does not read safetensors; weights cannot be identified",
            reason="load_format",
        )
    return Checkpoint.open(config.model_config.model, config.model_config.revision)


def tower_identity(config: VllmConfig) -> TowerIdentity:
    """Identity of this engine's tower and projector under its dtype and processor settings.

    Reads weights (cached on disk). Raises CheckpointError.
    """
    checkpoint = open_checkpoint(config)
    model = config.model_config
    dtype = dtype_name(model.dtype)
    mm_config = model.get_multimodal_config()
    processor_kwargs = dict(mm_config.mm_processor_kwargs or {})
    overrides = _overrides(config)
    try:
        identity = checkpoint.identity(dtype, processor_kwargs=processor_kwargs).identity
    except CheckpointError as e:
        if e.reason != "unknown_family":
            raise
        return TowerIdentity(overridden(_whole_model(checkpoint, dtype, processor_kwargs), overrides), None)
    return TowerIdentity(overridden(identity, overrides), None if overrides else identity)


def kv_identity(config: VllmConfig) -> tuple[bytes, dict[str, Any]]:
    """(language model fingerprint, KV spec without the page geometry). Reads weights once.

    Raises CheckpointError.
    """
    checkpoint = open_checkpoint(config)
    model = config.model_config
    text_config = checkpoint.kv_spec()
    spec: dict[str, Any] = {
        "config": text_config,
        "dtype": dtype_name(model.dtype),
        "overrides": _overrides(config),
    }
    if str(text_config["rope_parameters"].get("rope_type")) in {"dynamic", "longrope"}:
        spec["max_model_len"] = model.max_model_len
    return checkpoint.fingerprint("language_model"), spec


class Adapters:
    """Digests of LoRA adapters, read once for each path."""

    _FILES = ("adapter_config.json", "adapter_model.safetensors")

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[int, ...], ...], bytes]] = {}

    def digest(self, path: str) -> bytes:
        """Digest of an adapter's files.

        Raises CheckpointError: "lora" when they cannot be read, "lora_changed" when they are
        no longer those of the first time: which of the two the engine runs, nobody can say.
        """
        files = [Path(path) / name for name in self._FILES]
        try:
            stats = [file.stat() for file in files]
            signature = tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)
            if path not in self._known:
                parts = [digest("cornplug-adapter-file-v1", file.read_bytes()) for file in files]
                self._known[path] = signature, digest("cornplug-adapter-v1", *parts)
        except OSError as e:
            raise CheckpointError(
                f"adapter {path}: cannot read {e.filename}: {e.strerror}", reason="lora"
            ) from e
        known, found = self._known[path]
        if known != signature:
            raise CheckpointError(f"adapter {path} was changed under the engine", reason="lora_changed")
        return found


def _overrides(config: VllmConfig) -> dict[str, Any]:
    """Settings of the command line that change values and that the checkpoint does not know."""
    model = config.model_config
    found: dict[str, Any] = {}
    if callable(model.hf_overrides):
        raise CheckpointError(
            "hf_overrides is a function; its effect cannot be identified", reason="overrides"
        )
    if model.hf_overrides:
        found["hf_overrides"] = model.hf_overrides
    if model.quantization and not _declares_quantization(model.hf_config):
        found["quantization"] = str(model.quantization)
    try:
        json.dumps(found)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"hf_overrides cannot be identified: {e}", reason="overrides") from e
    return found


def _declares_quantization(hf_config: Any) -> bool:
    text = getattr(hf_config, "text_config", hf_config)
    return any(
        getattr(part, name, None) is not None
        for part in (hf_config, text)
        for name in ("quantization_config", "compression_config")
    )


def _whole_model(checkpoint: Checkpoint, dtype: str, processor_kwargs: dict[str, Any]) -> bytes:
    """For a family that we cannot cut: every weight and every setting counts, so only engines of
    the very same checkpoint share."""
    weights = checkpoint.fingerprint("language_model")
    spec = spec_fingerprint(
        {
            "whole": checkpoint.config,
            "preprocessor": {**checkpoint.preprocessor, **processor_kwargs},
            "dtype": dtype,
        }
    )
    return model_identity(weights, weights, spec)
