"""Which model an engine runs, as identities: read from its checkpoint, never from its name.

Both engines' rooms fill an `EngineModel` from their own configs, so that one checkpoint has
one identity whatever engine computes with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cornplug.checkpoint import Checkpoint
from cornplug.errors import CheckpointError
from cornplug.families import FAMILIES
from cornplug.identity import model_identity, overridden, spec_fingerprint

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class TowerIdentity:
    """What an engine's embeddings are computed from."""

    identity: bytes
    """32 bytes; part of every embedding key."""
    served_identity: bytes | None
    """The identity that an encoder service would list for this model; None where only this
    very model's engines can share (unknown family, or settings that the service lacks)."""
    picture_inputs: tuple[str, ...] = ()
    """What the service takes of a picture: the processor's outputs by name."""


def declares_quantization(hf_config: Any) -> bool:
    """Whether a checkpoint's own config (transformers' object) says that it is quantised."""
    text = getattr(hf_config, "text_config", hf_config)
    return any(
        getattr(part, name, None) is not None
        for part in (hf_config, text)
        for name in ("quantization_config", "compression_config")
    )


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A checkpoint, and what this engine's command line changes about it."""

    checkpoint: Checkpoint
    dtype: str
    """torch's name without "torch." in which the model runs."""
    max_model_len: int
    """Longest sequence in tokens: some rotary embeddings depend on it."""
    engine: str
    """Which engine computes: "vllm" or "sglang"."""
    proven: frozenset[str]
    """Families whose embeddings this engine makes as the encoder service does, by test."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The deployment's own arguments of the image processor."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Other settings that change values and that the checkpoint does not know; {} for none."""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.overrides)
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"overrides cannot be identified: {e}", reason="overrides") from e

    def tower_identity(self) -> TowerIdentity:
        """Identity of tower and projector. Reads weights (cached on disk). Raises CheckpointError.

        Of a family that is none of ours, servers of the same engine and checkpoint share: what
        another engine calls an embedding of it, nobody has compared.
        """
        name = str(self.checkpoint.config.get("model_type"))
        if name in FAMILIES and name not in self.proven:
            raise CheckpointError(
                f"nobody has compared what {self.engine} makes of {name!r} with what the encoder service "
                f"makes. Compared: {', '.join(sorted(self.proven))}.",
                reason="unproven_family",
            )
        try:
            identity = self.checkpoint.identity(self.dtype, processor_kwargs=self.processor_kwargs).identity
        except CheckpointError as e:
            if e.reason != "unknown_family":
                raise
            return TowerIdentity(
                overridden(self._whole_model(), {**self.overrides, "engine": self.engine}), None
            )
        served = None if self.overrides else identity
        inputs = self.checkpoint.family.inputs.get("image", ())
        return TowerIdentity(overridden(identity, self.overrides), served, inputs)

    def kv_identity(self) -> tuple[bytes, dict[str, Any]]:
        """(language model fingerprint, KV spec without the page geometry). Reads weights once.

        Raises CheckpointError.
        """
        text_config = self.checkpoint.kv_spec()
        spec: dict[str, Any] = {
            "config": text_config,
            "dtype": self.dtype,
            "overrides": dict(self.overrides),
        }
        if str(text_config["rope_parameters"].get("rope_type")) in _LENGTH_DEPENDENT_ROPE:
            spec["max_model_len"] = self.max_model_len
        return self.checkpoint.fingerprint("language_model"), spec

    def _whole_model(self) -> bytes:
        """For a family that we cannot cut: every weight and every setting counts, so only
        engines of the very same checkpoint share."""
        weights = self.checkpoint.whole_fingerprint()
        spec = spec_fingerprint(
            {
                "whole": self.checkpoint.config,
                "preprocessor": {**self.checkpoint.preprocessor, **self.processor_kwargs},
                "dtype": self.dtype,
            }
        )
        return model_identity(weights, weights, spec)
