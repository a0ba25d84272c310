"""The identities of an engine's model, from its checkpoint's files and the engine's settings.

Both engines' rooms fill an `EngineModel` from their own configs, so that one checkpoint has
one identity in both engines.

An engine whose weights are replaced from another folder while it runs goes on with the settings that it
started with, whatever the folder's config says. So its identity is of those settings and the new weights: a
fresh engine of that folder shares with it where its own settings come out the same.

Weights that a trainer named are in no file: their identity is of the start and that name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints import numeric_class
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import FAMILIES
from cornplug.checkpoints.families.generic import PROCESSOR_FILES
from cornplug.checkpoints.hub_cache import read_json
from cornplug.checkpoints.safetensors_digest import folder_fingerprint
from cornplug.engine_common import engine_state, resolved_config
from cornplug.errors import CheckpointError
from cornplug.identity import canonical, digest, of_trainer, overridden

_UNREAD: Final = ("_name_or_path", "transformers_version")
"""Fields of config.json that change no value."""


_PRECISION: Final = frozenset(
    f"environment{mark}{name}" for mark in " ." for name in numeric_class.PRECISION_VARIABLES
)
"""Names of the variables of `numeric_class` among the overrides of vLLM and of SGLang."""


@dataclass(frozen=True, slots=True)
class TowerIdentity:
    """The identity of the tower and projector that an engine's embeddings are computed with."""

    identity: bytes
    """32 bytes; part of every embedding key."""
    served_identity: bytes | None
    """The identity that an encoder service would list for this model; None where only engines
    with the same settings can share, which the service lacks."""
    image_inputs: tuple[str, ...] = ()
    """The outputs of the image processor that the service takes, by name."""
    videos: TowerIdentity | None = None
    """That of videos, which have another processor; None where they are not shared."""
    why_no_videos: str = "unproven_family"
    """The reason, where `videos` is None."""

    def of(self, modality: str) -> TowerIdentity | None:
        """The identity of one modality's embeddings; None where that modality is not shared."""
        return {"image": self, "video": self.videos}.get(modality)


def declares_quantization(hf_config: Any) -> bool:
    """Whether a checkpoint's own config (transformers' object) says that it is quantised."""
    text = getattr(hf_config, "text_config", hf_config)
    return any(
        getattr(part, name, None) is not None
        for part in (hf_config, text)
        for name in ("quantization_config", "compression_config")
    )


def declares_quantised_kv(hf_config: Any) -> str:
    """The field by which a checkpoint's own config (transformers' object) says that it brings scales of a
    quantised KV cache; "" for none."""
    said = getattr(hf_config, "quantization_config", None) or {}
    said = said if isinstance(said, dict) else said.to_dict()
    nested = said.get("quantization")
    for section in (said, nested if isinstance(nested, dict) else {}):
        for name in ("kv_cache_quant_algo", "kv_cache_scheme"):
            if section.get(name):
                return name
    return ""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A checkpoint, and the changes that this engine's command line makes to it."""

    checkpoint: Checkpoint
    dtype: str
    """torch's name without "torch." in which the model runs."""
    max_model_len: int
    """Longest sequence in tokens: some rotary embeddings depend on it."""
    engine: str
    """Which engine computes: "vllm" or "sglang"."""
    validated_families: frozenset[str]
    """Families whose embeddings this release of the engine makes with `dtype` as the encoder service does, by
    test."""
    generic_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`model_type` -> names of its tower's inputs for an image, of those among them without a file in
    `cornplug/checkpoints/families/`: nothing else tells the names before the model is loaded."""
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that change the LLM's positions of a video and no row of it: they are in its key, as KV is
    shared by that."""
    why_no_videos: str = "unproven_family"
    """The reason why this engine shares no videos of this model; "" if it does."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The deployment's own arguments of the image processor."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Other settings that change values and that the checkpoint does not know; {} for none."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """`engine_config.changes`: settings that this engine runs and the checkpoint's files do not hold."""
    length_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that belong to the key of models whose KV depends on `max_model_len`."""
    began_ns: int | None = None
    """Start time of the engine, by the clock of files. Of a file that changed later, the engine may have
    loaded an older version. None if unknown."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """`model_type` -> how often this engine's releases have changed the results; 0 if absent."""
    weight_version: str | None = None
    """The name that a trainer gave the weights which replaced the checkpoint's; None for the checkpoint's."""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.overrides)
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"cannot identify overrides: {e}", reason="overrides") from e

    def tower_identity(self) -> TowerIdentity:
        """Identity of tower and projector. Reads weights (cached on disk). Raises CheckpointError:
        "unproven_family" for one that was not compared in this release and dtype of the engine, and as
        `Checkpoint.identity`.
        """
        name = str(self.checkpoint.config.get("model_type"))
        described = name in FAMILIES and not self.checkpoint.family.generic
        if name not in self.validated_families or not (described or name in self.generic_inputs):
            compared = ", ".join(sorted(self.validated_families)) or "none"
            raise CheckpointError(
                f"this release has not been tested with {self.engine}'s embeddings of {name!r} in "
                f"{self.dtype}. Tested for {self.dtype}: {compared}.",
                reason="unproven_family",
            )
        identity = self.checkpoint.identity(self.dtype, processor_kwargs=self.processor_kwargs).identity
        self._refuse_later_files()
        overrides = self._overrides(name, resolved_config.of_towers(self.config_changes))
        # The checkpoint's identity has them, as an encoder service's has.
        overrides = {n: value for n, value in overrides.items() if n not in _PRECISION}
        inputs = self.generic_inputs.get(name) or self.checkpoint.family.inputs.get("image", ())
        whole = TowerIdentity(overridden(identity, overrides), None if overrides else identity, inputs)
        try:
            whole = replace(whole, videos=self._named(self._video_identity(name, overrides)))
        except CheckpointError as e:
            whole = replace(whole, why_no_videos=e.reason)
        return self._named(whole)

    def own_identity(self, engine: Mapping[str, Any]) -> TowerIdentity:
        """Identity of this very checkpoint's towers in one engine, whatever their family.

        No other engine and no service has it. Preprocessing is no part of it.

        `engine` holds what else changes a row: releases and settings. Reads all weights (cached on disk).
        Raises CheckpointError: "unknown_family" for a model with parts in another checkpoint, and as
        `folder_fingerprint`.
        """
        if self.checkpoint.base:
            raise CheckpointError(
                f"{self.checkpoint.path}: a part of this model is stored in another checkpoint.",
                reason="unknown_family",
            )
        name = str(self.checkpoint.config.get("model_type"))
        spec = {
            "config": {k: v for k, v in self.checkpoint.config.items() if k not in _UNREAD},
            "dtype": self.dtype,
            "numeric_class": numeric_class.USUAL,  # the settings are in `overrides`
            "engine": {"name": self.engine, **engine},
            "overrides": self._overrides(name, self.config_changes),
        }
        weights = folder_fingerprint(self.checkpoint.path)
        self._refuse_later_files()
        return self._named(TowerIdentity(digest("cornplug-own-tower-v1", weights, canonical(spec)), None))

    def _named(self, tower: TowerIdentity) -> TowerIdentity:
        """That of the trainer's weights: an encoder service has the checkpoint's."""
        if self.weight_version is None:
            return tower
        return replace(tower, identity=self._of_trainer(tower.identity), served_identity=None)

    def _of_trainer(self, identity: bytes) -> bytes:
        if self.weight_version is None:
            return identity
        return of_trainer(identity, folder_fingerprint(self.checkpoint.path), self.weight_version)

    def _video_identity(self, name: str, overrides: Mapping[str, Any]) -> TowerIdentity:
        """Identity of videos. Raises CheckpointError where this engine shares images alone."""
        if self.why_no_videos:
            raise CheckpointError(
                f"{self.engine} does not share videos of {name!r}", reason=self.why_no_videos
            )
        served = self.checkpoint.identity(
            self.dtype, modality="video", processor_kwargs=self.processor_kwargs
        ).identity
        # As written, too: two spellings are two keys, where the spec might read them as one.
        written = {"asked": dict(self.processor_kwargs), "json": dict(self.checkpoint.preprocessors["video"])}
        ours = {**overrides, "video": {**self.video_settings, **written}}
        return TowerIdentity(overridden(served, ours), None if overrides else served)

    def kv_identity(self) -> tuple[bytes, dict[str, Any]]:
        """(language model fingerprint, KV spec without the page geometry). Reads weights once.

        Raises CheckpointError.
        """
        text_config = self.checkpoint.kv_spec()
        changed = resolved_config.of_language_model(self.config_changes)
        spec: dict[str, Any] = {
            "config": text_config,
            "dtype": self.dtype,
            "overrides": self._overrides(str(text_config["model_type"]), changed),
        }
        if resolved_config.length_matters(text_config, self.checkpoint.config, changed):
            spec["length"] = {
                "max_model_len": self.max_model_len,
                "engine": self.engine,
                "settings": dict(self.length_settings),
                "generation": self.checkpoint.generation,
            }
        fingerprint = self._of_trainer(self.checkpoint.fingerprint("language_model"))
        self._refuse_later_files()
        return fingerprint, spec

    def _refuse_later_files(self) -> None:
        """After they were read: a change in between would show."""
        changed = self.checkpoint.changed_since(self.began_ns) if self.began_ns is not None else None
        if changed is not None:
            raise CheckpointError(
                f"{changed} changed after this engine began to load the model, so the loaded weights may be "
                "older. Restart the engine to share.",
                reason="weights_changed",
            )

    def _overrides(self, model_type: str, changed: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(self.overrides)
        if changed:
            found["config"] = dict(changed)
        if epoch := self.epochs.get(model_type, 0):
            found["epoch"] = f"{self.engine} {epoch}"
        return found


class StartedModel:
    """The model that this process's engine started with, described before any update.

    Later, the engine's settings may name the folder of the new weights.
    """

    def __init__(self) -> None:
        self._model: EngineModel | None = None

    @property
    def known(self) -> bool:
        """Whether this process has described it."""
        return self._model is not None

    def now(self, describe: Callable[[], EngineModel]) -> EngineModel:
        """The model with the weights of this epoch; `describe` describes that of the start.

        Raises CheckpointError: "weights_updated" where nothing is known to name them, and as
        `with_weights_of` and `describe`.
        """
        state = engine_state.current()
        if state.epoch() == 0:
            model = describe()
            if state.epoch() == 0:
                # Read before the first update began. A process may start one engine after another.
                self._model = model
            return model
        source = state.source()
        if source is not None and source.version is not None:
            return self.with_version(source.version)
        if source is None or source.path is None:
            raise _unknown("the weights were replaced")
        return self.with_weights(source.path, source.began_ns)

    def with_weights(self, path: str, began_ns: int) -> EngineModel:
        """`with_weights_of` the model. Raises CheckpointError as that."""
        if self._model is None:
            raise _unknown("this process has not described the model that it started with")
        return with_weights_of(self._model, path, began_ns)

    def with_version(self, version: str) -> EngineModel:
        """The model with weights that a trainer named. Raises CheckpointError("weights_updated")."""
        if self._model is None:
            raise _unknown("this process has not described the model that it started with")
        if self._model.checkpoint.base:
            raise _unknown("a part of this model is stored in another checkpoint")
        return replace(self._model, weight_version=version)


def with_weights_of(model: EngineModel, path: str, began_ns: int) -> EngineModel:
    """The same model, after a folder's weights were loaded over its own.

    `began_ns`: as `EngineModel.began_ns`, of that folder. Raises CheckpointError: "weights_updated" where the
    folder does not hold every tensor of the model, and no other, and as `Checkpoint.open`.
    """
    old = model.checkpoint
    if len(os.fsencode(path)) > engine_state.LONGEST_PATH_BYTES:
        raise _unknown("the path of the folder is too long")
    if not Path(path).is_dir():
        raise _unknown(f"the weights were replaced from {path!r}, which is not a folder")
    found = Checkpoint.open(path)
    if old.base or found.base:
        raise _unknown("a part of this model is stored in another checkpoint")
    new = replace(found, config=old.config, preprocessors=old.preprocessors)
    if old.tensor_layout() != new.tensor_layout():
        # Tensors that one of them lacks stay as they were: then no folder holds what runs.
        raise _unknown(f"{path} and {old.path} have different tensors")
    # The identity reads these from the folder, and the engine has read the other's.
    read = PROCESSOR_FILES if str(old.config.get("model_type")) in model.generic_inputs else ()
    for name in (*read, "generation_config.json"):
        if _settings(old, name) != _settings(new, name):
            raise _unknown(f"{name} differs between {path} and {old.path}")
    return replace(model, checkpoint=new, began_ns=began_ns)


def _settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    found = read_json(checkpoint.path / name) or {}
    return {field: value for field, value in found.items() if field != "transformers_version"}


def _unknown(why: str) -> CheckpointError:
    return CheckpointError(f"{why}. Restart the engine to share.", reason="weights_updated")
