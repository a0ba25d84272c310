"""Locates a checkpoint's files, and computes fingerprints and specs of the model's parts.

A "part" is the tower (vision or audio encoder), the projector or the language model. The "cut" is the layer
of a tower whose output is cached. Tensors behind the cut do not affect the cached embeddings.

This module reads config.json, the preprocessor's JSON and safetensors. It does not need torch, downloads
nothing, and never runs code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from cornplug.checkpoints.families import (
    FAMILIES,
    Modality,
    ModelFamily,
    Part,
    unusual_classes,
    without_inert,
)
from cornplug.checkpoints.generic_family import PROCESSOR_FILES, generic_family, processor_spec
from cornplug.checkpoints.model_family import current_numeric_class
from cornplug.checkpoints.safetensors_digest import TensorEntry, read_header, tensor_digests, tensor_files
from cornplug.errors import CheckpointError
from cornplug.identity import model_identity, spec_fingerprint, tensors_fingerprint

_MAX_JSON_BYTES: Final = 16 << 20
_PROCESSOR_LOCATIONS: Final[Mapping[Modality, tuple[str, tuple[str, ...]]]] = {
    "image": ("image_processor", ("preprocessor_config.json",)),
    "video": ("video_processor", ("video_preprocessor_config.json", "preprocessor_config.json")),
    "audio": ("feature_extractor", ("preprocessor_config.json",)),
}
"""Locations at which transformers 5 looks for a processor: first a field of processor_config.json, then
separate files."""
__all__ = ["Checkpoint", "ModelIdentity", "Part"]
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_SUB_CONFIGS: Final = frozenset({"vision_config", "audio_config", "text_config"})


def read_processor_jsons(path: Path) -> dict[Modality, dict[str, Any]]:
    """Return the JSON of each modality's processor, or {} for a modality without a processor."""
    together = read_json(path / "processor_config.json") or {}
    return {modality: _read_processor_json(path, together, modality) for modality in _PROCESSOR_LOCATIONS}


def find_cached_snapshot(model: str, revision: str | None, cache_dir: str | None = None) -> Path:
    """Return the folder of a model in the local Hugging Face cache, or in `cache_dir`.

    Raises CheckpointError("not_found").
    """
    # Import huggingface_hub only when it is needed, because this takes longer than reading a checkpoint
    # folder.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as e:
        raise CheckpointError(
            f"{model} is neither a folder nor in the local Hugging Face cache. Run: hf download {model}",
            reason="not_found",
        ) from e


def _read_processor_json(path: Path, together: Mapping[str, Any], modality: Modality) -> dict[str, Any]:
    nested, files = _PROCESSOR_LOCATIONS[modality]
    found = together.get(nested)
    if isinstance(found, dict):
        return found
    given = (read_json(path / name) for name in files)
    return next((content for content in given if content is not None), {})


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object, or return None if the file does not exist."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes.", reason="bad_config")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}.", reason="unreadable") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a JSON object: {e}.", reason="bad_config") from e


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Digests (32 bytes each) of everything that affects a model's embeddings, apart from the media item."""

    identity: bytes
    tower_fp: bytes
    projector_fp: bytes
    spec_fp: bytes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint folder. Use `open` to create it."""

    path: Path
    config: dict[str, Any]
    """Content of config.json."""
    preprocessors: Mapping[Modality, dict[str, Any]]
    """JSON of each modality's processor, or {} for a modality without a processor."""
    base: Checkpoint | None = None
    """Checkpoint that contains one of this model's parts (`ModelFamily.base`), or None."""

    @classmethod
    def open(cls, model: str, revision: str | None = None, *, cache_dir: str | None = None) -> Checkpoint:
        """Open a checkpoint in a folder, in the local Hugging Face cache, or in the cache `cache_dir`.

        `model` is the path of the folder or the model's id on the hub. Nothing is downloaded. Raises
        CheckpointError: "not_found" or "bad_config".
        """
        path = Path(model) if Path(model).is_dir() else find_cached_snapshot(model, revision, cache_dir)
        config = read_json(path / "config.json")
        if config is None:
            raise CheckpointError(f"{path} has no config.json. Use a checkpoint folder.", reason="not_found")
        processors = read_processor_jsons(path)
        family = FAMILIES.get(str(config.get("model_type")))
        elsewhere = family.base.name_in_config(config) if family and family.base else None
        if elsewhere is None:
            return cls(path, config, processors)
        assert family is not None
        assert family.base is not None
        # As in the engines, the base has no revision, and its config replaces the field of config.json.
        base = cls.open(str(elsewhere))
        processors = {modality: own or base.preprocessors[modality] for modality, own in processors.items()}
        return cls(path, {**config, family.base.config_field: base.config}, processors, base)

    @property
    def family(self) -> ModelFamily:
        """Family that describes this checkpoint: the family for its `model_type`, or a generic family.

        Raises CheckpointError("unknown_family") if the model has neither image nor audio inputs.
        """
        described = FAMILIES.get(str(self.config.get("model_type")))
        if described is not None and described.fits(self.config):
            return described
        family = generic_family(self.config, self.preprocessors) or described
        if family is None:
            raise CheckpointError(
                f"{self.path}: model_type {self.config.get('model_type')!r} is not a known family, and the "
                f"checkpoint's JSON has neither image_processor_type nor feature_extractor_type. "
                f"Supported families: {', '.join(FAMILIES)}, and families with a tower in transformers.",
                reason="unknown_family",
            )
        return family

    @property
    def preprocessor(self) -> dict[str, Any]:
        """JSON of the image processor."""
        return self.preprocessors["image"]

    def fingerprint(self, part: Part, modality: Modality | None = None) -> bytes:
        """Return the fingerprint of a part's weights.

        The fingerprint does not depend on the naming scheme or on how the tensors are split into files. Only
        the tensors of a tower up to the cut are included (`ModelFamily.before_cut`). If the model's family is
        generic, the language model consists of all tensors, and the tower of all tensors outside the decoder.
        `modality` None means the family's first modality. A modality with its own tower has its own
        fingerprint. Raises the same errors as `locate`, and CheckpointError("unreadable") or ("changed").
        """
        return _fingerprint_tensors(self._part_tensors(part, modality))

    def locate(self, part: Part, modality: Modality | None = None) -> dict[str, tuple[Path, str]]:
        """Return the location of a part's tensors up to the cut, as normalised name -> (file, name in the
        file).

        Names of the tower's and the projector's tensors are relative to the part: `encoder.layers.0...`,
        `linear_1.weight`, `blocks.0...`, `ln_q.weight`. Names of the language model's tensors are
        `model.layers.0...`, `lm_head.weight`. Raises CheckpointError: "unknown_family" (for tower or
        projector), "no_weights" (the part has no tensors), and the errors of `tensor_files`.
        """
        return {
            normal: (file, name) for normal, (file, name, _) in self._part_tensors(part, modality).items()
        }

    def find_changed_file(self, moment_ns: int) -> Path | None:
        """Return a file with weights or settings that changed at or after `moment_ns`, or None.

        `moment_ns` is a time on the clock of file timestamps (`engine_state.file_clock_ns`). Files in the
        hub's cache are not checked, because they are named by their content and never modified. Raises
        CheckpointError("unreadable").
        """
        files = {file for rows in self._tensors_by_part.values() for file, _, _ in rows.values()}
        for file in sorted(files | set(self.path.glob("*.json"))):
            try:
                if file.stat().st_ctime_ns >= moment_ns and file.resolve().parent.name != "blobs":
                    return file
            except OSError as e:
                raise CheckpointError(f"cannot read {file}: {e.strerror}.", reason="unreadable") from e
        return None

    def tensors(self, part: Part) -> list[tuple[str, Path, TensorEntry]]:
        """Return (normalised name, file, entry) for a part's tensors up to the cut.

        Raises the same errors as `locate`.
        """
        return [(normal, file, entry) for normal, (file, _, entry) in self._part_tensors(part).items()]

    def tensor_shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a part's tensors up to the cut, by normalised name.

        Raises the same errors as `locate`.
        """
        return {normal: tuple(entry.shape) for normal, (_, _, entry) in self._part_tensors(part).items()}

    def tensor_layout(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """Return part -> normalised name -> (dtype, shape) for all tensors that engines read.

        Raises the same errors as `locate`.
        """
        return {
            part: {normal: (entry.dtype, tuple(entry.shape)) for normal, (_, _, entry) in rows.items()}
            for part, rows in self._tensors_by_part.items()
        }

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json, or {} if the file does not exist."""
        return read_json(self.path / "generation_config.json") or {}

    def tower_spec(
        self, dtype: str, *, modality: Modality | None = None, numeric_class: str | None = None
    ) -> dict[str, Any]:
        """Return all settings that affect the tower's output: family, config up to the cut, dtype.

        Weights are not included.

        Args:
            dtype: dtype in which the tower runs, as torch's name without "torch.".
            modality: modality, or None for the family's first modality.
            numeric_class: numeric class, or None for the class of this process.
        """
        family = self.family
        chosen = modality or family.first_modality
        classes = unusual_classes(self.config)
        return ({"classes": classes} if classes else {}) | {
            "family": family.name,
            "tower": family.tower_spec(family.config_of(self.config, chosen)),
            "dtype": dtype,
            "numeric_class": numeric_class or current_numeric_class(),
            "quantization": self._quantisation("tower", chosen),
        }

    def embedding_spec(
        self,
        dtype: str,
        *,
        modality: Modality | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        numeric_class: str | None = None,
    ) -> dict[str, Any]:
        """Return all settings that affect an embedding: `tower_spec`, projector and preprocessor.

        Takes the arguments of `tower_spec` and `processor_kwargs`, with which an engine overrides the
        preprocessor's settings (vLLM's `mm_processor_kwargs`). Raises CheckpointError("modality") if the
        family does not support the modality.
        """
        family = self.family
        chosen = modality or family.first_modality
        if chosen not in family.inputs:
            raise CheckpointError(
                f"{self.path}: {family.name} does not support {chosen}, only {', '.join(family.inputs)}.",
                reason="modality",
            )
        asked = {**family.processor_defaults.get(chosen, {}), **(processor_kwargs or {})}
        # transformers reads `backend` and `use_fast` only from a caller's arguments, never from the JSON.
        published = {k: v for k, v in self.preprocessors[chosen].items() if k not in ("backend", "use_fast")}
        preprocessor = {**published, **asked}
        pixels = family.preprocess_spec_of(chosen)(preprocessor)
        if family.generic:
            files = {name: read_json(self.path / name) or {} for name in PROCESSOR_FILES}
            pixels = {"files": processor_spec(files, chosen), "asked": asked}
        if "size" in asked and not {"min_pixels", "max_pixels"}.isdisjoint(published):
            # Whether the file's limits or the caller's size apply depends on where the caller passes the
            # size: transformers' `from_pretrained` uses the limits, and a call of the processor uses the
            # size.
            pixels["asked_size"] = asked["size"]
        # The spec does not contain the first modality, because the identities of the first modality existed
        # before other modalities were added.
        named = {} if chosen == family.first_modality else {"modality": chosen}
        return named | {
            "tower": self.tower_spec(dtype, modality=chosen, numeric_class=numeric_class),
            "projector": family.projector_spec(self.config),
            "projector_quantization": self._quantisation("projector", chosen),
            "preprocessor": pixels,
        }

    def identity(
        self,
        dtype: str,
        *,
        modality: Modality | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        numeric_class: str | None = None,
    ) -> ModelIdentity:
        """Return the identity under which embeddings of this model and modality are shared.

        Reads the weights. Takes the same arguments and raises the same errors as `embedding_spec`.
        """
        spec = self.embedding_spec(
            dtype, modality=modality, processor_kwargs=processor_kwargs, numeric_class=numeric_class
        )
        tower, projector = self.fingerprint("tower", modality), self.fingerprint("projector", modality)
        spec_fp = spec_fingerprint(spec)
        return ModelIdentity(model_identity(tower, projector, spec_fp), tower, projector, spec_fp)

    def kv_spec(self) -> dict[str, Any]:
        """Return all settings that affect KV: the text config without names. Weights are not included.

        Rope settings are normalised, so that files from transformers 4 and 5 have the same spec.
        """
        whole = self.config
        text = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
        # In a flat file, the towers' configs are next to the text's own fields.
        spec = {k: v for k, v in without_inert(text).items() if k not in _SUB_CONFIGS}
        # Flat and nested files of one family have different `model_type`s for the text config.
        spec["model_type"] = str(spec.get("model_type", "")).removesuffix("_text")
        for config, name in ((whole, "classes"), (text, "text_classes")):
            if found := unusual_classes(config):
                spec[name] = found
        for name in ("quantization_config", "compression_config"):
            declared = text.get(name, whole.get(name))
            if declared is not None:
                spec[name] = declared
        theta, scaling = spec.pop("rope_theta", None), spec.pop("rope_scaling", None)
        rope = {**(scaling or {}), **(spec.pop("rope_parameters", None) or {})}
        if theta is not None:
            rope.setdefault("rope_theta", theta)
        legacy = rope.pop("type", "default")
        rope.setdefault("rope_type", legacy)
        if rope["rope_type"] == "mrope":  # transformers 5 reads `mrope_section`.
            rope["rope_type"] = "default"
        return spec | {"rope_parameters": rope}

    def _quantisation(self, part: Part, modality: Modality) -> object:
        """Return the quantisation config if the part has quantised tensors, else None."""
        if all(entry.dtype in _FLOATS for _, _, entry in self._part_tensors(part, modality).values()):
            return None
        return self.config.get("quantization_config")

    def _part_tensors(
        self, part: Part, modality: Modality | None = None
    ) -> dict[str, tuple[Path, str, TensorEntry]]:
        family = None if part == "language_model" else self.family
        held: Part = part
        if family is not None and family.generic:
            if part == "projector":
                return {}  # All tensors belong to the tower.
            held = "language_model"
        rows = self._tensors_by_part.get(held)
        if family is not None and family.generic:
            # If the family of the `model_type` does not fit, `_tensors_by_part` has divided the tensors
            # between parts and renamed them. Join them under their published names.
            rows = {row[1]: row for found in self._tensors_by_part.values() for row in found.values()}
        if not rows:
            raise CheckpointError(f"{self.path} has no tensors of its {part}.", reason="no_weights")
        if family is None or part == "projector":
            return rows
        chosen = modality or family.first_modality
        return {
            name: row
            for name, row in rows.items()
            if family.before_cut(self.config, name) and family.reaches(row[1], chosen)
        }

    @cached_property
    def _tensors_by_part(self) -> dict[Part, dict[str, tuple[Path, str, TensorEntry]]]:
        family = FAMILIES.get(str(self.config.get("model_type")))
        parts: dict[Part, dict[str, tuple[Path, str, TensorEntry]]] = {}
        for file in tensor_files(self.path):
            for name, entry in read_header(file).items():
                part, normal = family.classify(name) if family else ("language_model", name)
                if part == "language_model" and family and self._is_unread(normal):
                    continue
                rows = parts.setdefault(part, {})
                if normal in rows:
                    raise CheckpointError(
                        f"{self.path}: {name!r} in {file.name} and {rows[normal][1]!r} in "
                        f"{rows[normal][0].name} are the same tensor. Remove stray weight files.",
                        reason="duplicate_tensor",
                    )
                rows[normal] = (file, name, entry)
        if family and family.base and self.base:
            if parts.get(family.base.part):
                raise CheckpointError(
                    f"{self.path} contains a {family.base.part} and refers to {self.base.path} for it, and "
                    "engines disagree on which one to use. Remove one of them.",
                    reason="duplicate_tensor",
                )
            parts[family.base.part] = _tensors_with_prefixes(self.base.path, family.base.prefixes)
        return parts

    def _is_unread(self, name: str) -> bool:
        """Return whether engines ignore this tensor, such as a rope table or a copy of a tied head."""
        text = self.config.get("text_config")
        tied = self.config.get("tie_word_embeddings") or (
            isinstance(text, dict) and text.get("tie_word_embeddings")
        )
        return name.endswith("rotary_emb.inv_freq") or (bool(tied) and name == "lm_head.weight")


def _tensors_with_prefixes(path: Path, prefixes: tuple[str, ...]) -> dict[str, tuple[Path, str, TensorEntry]]:
    """Return the tensors of a checkpoint with these prefixes, by name without the prefix."""
    return {
        name[len(prefix) :]: (file, name, entry)
        for file in tensor_files(path)
        for name, entry in read_header(file).items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


def _fingerprint_tensors(rows: Mapping[str, tuple[Path, str, TensorEntry]]) -> bytes:
    wanted: dict[Path, dict[str, TensorEntry]] = {}
    for file, name, entry in rows.values():
        wanted.setdefault(file, {})[name] = entry
    digests = tensor_digests(wanted)
    return tensors_fingerprint(
        (normal, entry.dtype, entry.shape, digests[file][name])
        for normal, (file, name, entry) in rows.items()
    )
