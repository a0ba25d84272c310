"""Identities of an engine's model, computed from the checkpoint's files and the engine's settings, and the
root of its page keys. The root is a digest of everything that determines KV except the tokens.

The vLLM and SGLang plugins fill an `EngineModel` from the engine's config. Thus a checkpoint has the same
identity in both engines.

When weights from another folder replace an engine's weights at run time, the engine keeps its initial
settings, regardless of that folder's config. The engine's identity then combines the initial settings and the
new weights. An engine that starts from that folder shares with this engine if both have the same
settings.

Weights that a trainer sent are not in any file. Their identity combines the initial checkpoint and the
trainer's version.

MLA latents have the same bytes in both engines only for models on an allow list. A test compares the latents
of these models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint, read_json
from cornplug.checkpoints.families import FAMILIES
from cornplug.checkpoints.generic_family import PROCESSOR_FILES
from cornplug.checkpoints.model_family import PRECISION_VARIABLES, USUAL_NUMERIC_CLASS
from cornplug.checkpoints.safetensors_digest import folder_fingerprint
from cornplug.engine_common import engine_config, engine_state
from cornplug.errors import CheckpointError
from cornplug.identity import canonical_json, digest, identity_with_overrides, kv_root, trainer_identity
from cornplug.kv_page import PageGeometry

_IRRELEVANT_FIELDS: Final = ("_name_or_path", "transformers_version")
"""Fields of config.json that do not affect results."""

_PRECISION_OVERRIDES: Final = frozenset(
    f"environment{mark}{name}" for mark in " ." for name in PRECISION_VARIABLES
)
"""Names under which the environment variables in `PRECISION_VARIABLES` appear in the overrides of vLLM and
SGLang."""

_COMPARED_ARCHITECTURES: Final = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""Model architectures for which tests/integration/test_latents_of_two_engines.py compares the latents of
both engines."""
_YARN_TYPES: Final = frozenset({"yarn", "deepseek_yarn"})
"""Names of YaRN rotary embeddings: the published name, and the name that both engines write into the config
of a loaded model."""
_COMMON_ROPE_FIELDS: Final = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
"""Config fields of rotary embeddings that both engines interpret in the same way."""


@dataclass(frozen=True, slots=True)
class TowerIdentity:
    """Identity of the tower and projector that compute an engine's embeddings."""

    identity: bytes
    """Identity of the tower under the engine's settings: 32 bytes that are part of every embedding key."""
    served_identity: bytes | None
    """Identity under which an encoder service lists this tower. None if the engine has settings that the
    service does not have, so that only engines with the same settings can share."""
    image_inputs: tuple[str, ...] = ()
    """Names of the image processor's outputs that the encoder service accepts as inputs."""
    videos: TowerIdentity | None = None
    """Identity for embeddings of videos, which have a separate processor. None if videos are not shared."""
    why_no_videos: str = "unproven_family"
    """Reason why videos are not shared, if `videos` is None."""

    def for_modality(self, modality: str) -> TowerIdentity | None:
        """Return the identity of one modality's embeddings, or None if the modality is not shared."""
        return {"image": self, "video": self.videos}.get(modality)


def declares_quantisation(hf_config: Any) -> bool:
    """Return whether a checkpoint's config (a transformers object) declares quantisation."""
    text = getattr(hf_config, "text_config", hf_config)
    return any(
        getattr(part, name, None) is not None
        for part in (hf_config, text)
        for name in ("quantization_config", "compression_config")
    )


def quantised_kv_field(hf_config: Any) -> str:
    """Return the config field that declares scales for a quantised KV cache, or "" if there is none.
    `hf_config` is a transformers object."""
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
    """Description of the model that an engine runs: a checkpoint, and the engine's settings that change
    results."""

    checkpoint: Checkpoint
    dtype: str
    """dtype in which the model runs: the name of the torch dtype without the "torch." prefix."""
    max_model_len: int
    """Maximum sequence length in tokens. Some rotary embeddings depend on it."""
    engine: str
    """Name of the engine: "vllm" or "sglang"."""
    validated_families: frozenset[str]
    """Model families with proven embeddings: tests have shown that this engine release with `dtype` computes
    the same embeddings as the encoder service."""
    generic_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the tower's inputs for an image, by `model_type`, for families that are not listed in
    `cornplug/checkpoints/families.py`. These names cannot be determined before the model is loaded."""
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that change the language model's positions for a video, but not its embedding. They are part
    of the video's key, because KV keys contain the video's key."""
    why_no_videos: str = "unproven_family"
    """Reason why this engine does not share videos with this model, or "" if it does."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the image processor that this deployment sets."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Further engine settings that change results and are not in the checkpoint, as JSON values by name."""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    """Result of `engine_config.config_changes`: config fields in which this engine differs from the
    checkpoint's files."""
    length_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that become part of the key only for models whose KV depends on `max_model_len`."""
    began_ns: int | None = None
    """Start time of the engine in nanoseconds on the clock of file timestamps, or None if unknown. If a file
    changed after this time, the engine may have loaded the older version."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Number of changes of a model's results between releases of this engine, by `model_type`. A missing
    model has 0 changes."""
    weight_version: str | None = None
    """Version that a trainer gave the weights, or None if the weights are from the checkpoint."""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.overrides)
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"cannot identify overrides: {e}", reason="overrides") from e

    def tower_identity(self) -> TowerIdentity:
        """Return the identity of the model's tower and projector. Reads weights (cached on disk).

        Raises CheckpointError("unproven_family") if no test covers the family with this engine release and
        dtype, and the same errors as `Checkpoint.identity`."""
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
        self._check_files_unchanged()
        overrides = self._all_overrides(name, engine_config.tower_changes(self.config_changes))
        # The checkpoint's identity already contains these variables, as in the encoder service.
        overrides = {n: value for n, value in overrides.items() if n not in _PRECISION_OVERRIDES}
        inputs = self.generic_inputs.get(name) or self.checkpoint.family.inputs.get("image", ())
        whole = TowerIdentity(
            identity_with_overrides(identity, overrides), None if overrides else identity, inputs
        )
        try:
            whole = replace(whole, videos=self._versioned_tower(self._video_identity(name, overrides)))
        except CheckpointError as e:
            whole = replace(whole, why_no_videos=e.reason)
        return self._versioned_tower(whole)

    def engine_only_identity(self, engine_details: Mapping[str, Any]) -> TowerIdentity:
        """Return a tower identity that only this engine uses, for a model family that no test covers.

        Other engines and the encoder service never compute this identity. Preprocessing is not part of it.

        `engine` contains everything else that changes an embedding, such as releases and settings. Reads all
        weights (cached on disk). Raises CheckpointError("unknown_family") if a part of the model is in
        another checkpoint, and the same errors as `folder_fingerprint`.
        """
        if self.checkpoint.base:
            raise CheckpointError(
                f"{self.checkpoint.path}: a part of this model is stored in another checkpoint.",
                reason="unknown_family",
            )
        name = str(self.checkpoint.config.get("model_type"))
        spec = {
            "config": {k: v for k, v in self.checkpoint.config.items() if k not in _IRRELEVANT_FIELDS},
            "dtype": self.dtype,
            "numeric_class": USUAL_NUMERIC_CLASS,  # The settings are in `overrides`.
            "engine": {"name": self.engine, **engine_details},
            "overrides": self._all_overrides(name, self.config_changes),
        }
        weights = folder_fingerprint(self.checkpoint.path)
        self._check_files_unchanged()
        return self._versioned_tower(
            TowerIdentity(digest("cornplug-own-tower-v1", weights, canonical_json(spec)), None)
        )

    def _versioned_tower(self, tower: TowerIdentity) -> TowerIdentity:
        """Return `tower`. If the weights are a trainer's version, replace the identity by an identity for
        that version, and `served_identity` by None."""
        if self.weight_version is None:
            return tower
        return replace(tower, identity=self._versioned_digest(tower.identity), served_identity=None)

    def _versioned_digest(self, identity: bytes) -> bytes:
        if self.weight_version is None:
            return identity
        return trainer_identity(identity, folder_fingerprint(self.checkpoint.path), self.weight_version)

    def _video_identity(self, name: str, overrides: Mapping[str, Any]) -> TowerIdentity:
        """Return the identity for embeddings of videos. Raises CheckpointError if this engine does not share
        videos."""
        if self.why_no_videos:
            raise CheckpointError(
                f"{self.engine} does not share videos of {name!r}", reason=self.why_no_videos
            )
        served = self.checkpoint.identity(
            self.dtype, modality="video", processor_kwargs=self.processor_kwargs
        ).identity
        # The settings are also included as they were written, so two spellings have two keys even if the spec
        # treats them as equal.
        written = {"asked": dict(self.processor_kwargs), "json": dict(self.checkpoint.preprocessors["video"])}
        ours = {**overrides, "video": {**self.video_settings, **written}}
        return TowerIdentity(identity_with_overrides(served, ours), None if overrides else served)

    def kv_identity(self) -> tuple[bytes, dict[str, Any]]:
        """Return (language model fingerprint, KV spec without the page geometry). Reads the weights.

        Raises CheckpointError if the model's KV cannot be identified.
        """
        text_config = self.checkpoint.kv_spec()
        changed = engine_config.language_model_changes(self.config_changes)
        spec: dict[str, Any] = {
            "config": text_config,
            "dtype": self.dtype,
            "overrides": self._all_overrides(str(text_config["model_type"]), changed),
        }
        if engine_config.depends_on_length(text_config, self.checkpoint.config, changed):
            spec["length"] = {
                "max_model_len": self.max_model_len,
                "engine": self.engine,
                "settings": dict(self.length_settings),
                "generation": self.checkpoint.generation_config,
            }
        fingerprint = self._versioned_digest(self.checkpoint.fingerprint("language_model"))
        self._check_files_unchanged()
        return fingerprint, spec

    def _check_files_unchanged(self) -> None:
        """Raise CheckpointError("weights_changed") if a file of the checkpoint changed after the engine
        started. Call it after reading the files, so that a change while reading is detected."""
        changed = self.checkpoint.find_changed_file(self.began_ns) if self.began_ns is not None else None
        if changed is not None:
            raise CheckpointError(
                f"{changed} changed after this engine began to load the model, so the loaded weights may be "
                "older. Restart the engine to share.",
                reason="weights_changed",
            )

    def _all_overrides(self, model_type: str, changed: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(self.overrides)
        if changed:
            found["config"] = dict(changed)
        if epoch := self.epochs.get(model_type, 0):
            found["epoch"] = f"{self.engine} {epoch}"
        return found


class InitialModel:
    """Description of the model as it was when this process's engine started, before any weight update.

    The description is kept because the engine's settings may name another folder after an update.
    """

    def __init__(self) -> None:
        self._model: EngineModel | None = None

    @property
    def is_known(self) -> bool:
        """Whether this process has already described the initial model."""
        return self._model is not None

    def current(self, describe: Callable[[], EngineModel]) -> EngineModel:
        """Return the description of the model with its current weights. `describe` returns the description of
        the initial model.

        Raises CheckpointError("weights_updated") if the weights are unknown, and the same errors as
        `replace_weights` and `describe`.
        """
        state = engine_state.current()
        if state.epoch() == 0:
            model = describe()
            if state.epoch() == 0:
                # The model was described before the first update. A process may start several engines in
                # turn, so keep the latest description.
                self._model = model
            return model
        source = state.source()
        if source is not None and source.version is not None:
            return self.with_version(source.version)
        if source is None or source.path is None:
            raise _unknown_weights_error("the weights were replaced")
        return self.with_weights(source.path, source.began_ns)

    def with_weights(self, path: str, began_ns: int) -> EngineModel:
        """Return the description of the model with the weights from a folder. Raises the same errors as
        `replace_weights`."""
        if self._model is None:
            raise _unknown_weights_error("this process has not described the model that it started with")
        return replace_weights(self._model, path, began_ns)

    def with_version(self, version: str) -> EngineModel:
        """Return the description of the model with weights that a trainer sent and named `version`. Raises
        CheckpointError("weights_updated") if the model cannot have a version."""
        if self._model is None:
            raise _unknown_weights_error("this process has not described the model that it started with")
        if self._model.checkpoint.base:
            raise _unknown_weights_error("a part of this model is stored in another checkpoint")
        return replace(self._model, weight_version=version)


def replace_weights(model: EngineModel, path: str, began_ns: int) -> EngineModel:
    """Return the description of `model` after the weights in the folder `path` were loaded into it.

    `began_ns` is a time before the folder was read (`EngineModel.began_ns`). Raises
    CheckpointError("weights_updated") if the folder does not contain exactly the model's tensors, and the
    same errors as `Checkpoint.open`.
    """
    old = model.checkpoint
    if len(os.fsencode(path)) > engine_state.MAX_PATH_BYTES:
        raise _unknown_weights_error("the path of the folder is too long")
    if not Path(path).is_dir():
        raise _unknown_weights_error(f"the weights were replaced from {path!r}, which is not a folder")
    found = Checkpoint.open(path)
    if old.base or found.base:
        raise _unknown_weights_error("a part of this model is stored in another checkpoint")
    new = replace(found, config=old.config, preprocessors=old.preprocessors)
    if old.tensor_layout() != new.tensor_layout():
        # Tensors that are missing in the new folder keep their old values, so the running weights would not
        # be those of any folder.
        raise _unknown_weights_error(f"{path} and {old.path} have different tensors")
    # The identity is computed from these files in the new folder, but the engine has read the files in the
    # old folder.
    read = PROCESSOR_FILES if str(old.config.get("model_type")) in model.generic_inputs else ()
    for name in (*read, "generation_config.json"):
        if _read_settings(old, name) != _read_settings(new, name):
            raise _unknown_weights_error(f"{name} differs between {path} and {old.path}")
    return replace(model, checkpoint=new, began_ns=began_ns)


def _read_settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    found = read_json(checkpoint.path / name) or {}
    return {field: value for field, value in found.items() if field != "transformers_version"}


def _unknown_weights_error(why: str) -> CheckpointError:
    return CheckpointError(f"{why}. Restart the engine to share.", reason="weights_updated")


def page_root(
    secret: bytes,
    identity: tuple[bytes, Mapping[str, Any]],
    page: PageGeometry,
    *,
    adapter: bytes | None,
    salt: str | None,
) -> bytes:
    """Return the root from which page keys are derived (32 bytes), for one model, page geometry, adapter and
    salt.

    Args:
        identity: (language model fingerprint, KV spec), from `EngineModel.kv_identity`.
        page: geometry of the complete model's pages, not of one rank's shard.
        adapter: `LoraDigests.digest` of the request's LoRA adapter, or None.
        salt: the tenant's salt, or None for the domain that the whole deployment shares. "" is a valid salt.
    """
    fingerprint, spec = identity
    extra: dict[str, Any] = {"page": page.spec()}
    if adapter is not None:
        extra["lora"] = adapter.hex()
    return kv_root(secret, fingerprint, {**spec, **extra}, salt)


def only_engine_of_latents(engine: str, config: Mapping[str, Any]) -> str:
    """Return the only engine that can share this model's MLA latents, for `PageGeometry.engine`, or "" if
    both engines can share them.

    Args:
        engine: "vllm" or "sglang".
        config: the complete config that the engine runs, from transformers' `to_dict`.
    """
    rope, named = config.get("rope_parameters") or {}, set(config.get("architectures") or ())
    compared = (
        len(named) == 1
        and named <= _COMPARED_ARCHITECTURES
        # Both engines cache the rotary key with interleaved pairs. SGLang reads this field, but vLLM does
        # not.
        and config.get("rope_interleave", True) is True
        # SGLang uses a different class for unscaled rotary embeddings, which is not tested.
        and rope.get("rope_type") in _YARN_TYPES
        and rope.keys() <= _COMMON_ROPE_FIELDS
    )
    return "" if compared else engine
