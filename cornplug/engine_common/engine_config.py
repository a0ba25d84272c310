"""Classification of an engine's settings and model config. Each value becomes part of the key, is harmless,
or prevents sharing.

Each release of an engine adds settings, and a new setting may change results. Therefore a field that is in
none of the tables prevents sharing if it is set. The tables are in the packages for vLLM and SGLang. A test
calls `find_misplaced` for the tables of every config class.

Engines with equal checkpoint files must compute equal keys. Therefore the model config that an engine runs
(which may be patched or overridden) is compared with the config that transformers reads from the same files,
and every difference becomes part of the keys.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints.checkpoint import read_json
from cornplug.checkpoints.families import unusual_classes, without_inert
from cornplug.errors import CheckpointError
from cornplug.identity import digest

AS_OVERRIDE: Final = "override"
"""Entry of `FieldTables.in_key` for a field whose value becomes part of the key unless it is the default."""
_UNKNOWN_SETTING: Final = (
    "the setting is unknown to this release of cornplug; leave it at its default to share"
)

_ROPES_OF_ANY_LENGTH: Final = frozenset({"default", "linear", "llama3", "mrope", "yarn", "axial"})
"""Types of rotary embeddings whose tables depend only on the config in both engines, and not on the
maximum sequence length."""
_ANY_LENGTH: Final = """
chatglm cohere cohere2 deepseek_v2 deepseek_v3 exaone falcon gemma gemma2 gemma3 glm glm4 gpt_neox gpt_oss
granite internlm2 internvl llama llava llava_next llava_onevision mistral mixtral olmo olmo2 phi phi3
qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe smollm3 starcoder2
"""
_MODELS_OF_ANY_LENGTH: Final = frozenset(_ANY_LENGTH.split())
"""`model_type`s of text models whose code in vLLM 0.32 and SGLang 0.5.23 does not read the maximum sequence
length. Llama 4, for example, is not included, because it scales its attention by this length. Plamo 3 and
MiniMax-M2 are not included, because their table sizes depend on this length."""
_JSON_WITH_CODE: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
_TEXT_PREFIXES: Final = ("text_config.", "llm_config.")
_TOWER_PATH: Final = re.compile(r"(vision|audio|visual|speech)[a-z_]*(config|_cfg)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTables:
    """The three tables (`in_key`, `harmless`, `refused`) of one config class. Every field of the class is in
    exactly one of them."""

    class_name: str
    """Name of the config class, for messages."""
    in_key: Mapping[str, str]
    """Fields that affect the key, by name. The value is `AS_OVERRIDE`, or a text that describes how the field
    affects the key."""
    harmless: Mapping[str, str]
    """Fields that do not change shared entries, each with the reason."""
    refused: Mapping[str, str]
    """Fields that prevent sharing if they are not at their default, each with the reason."""
    same_as_default: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    """Values that are equivalent to the default, by field name."""
    release_dependent: frozenset[str] = frozenset()
    """Names of fields that only some of the supported releases have."""


@dataclass(frozen=True, slots=True)
class SettingsVerdict:
    """Result of the check of one engine's settings: settings that become part of every key, and settings that
    prevent sharing."""

    overrides: Mapping[str, Any]
    """Settings that are part of every key, as "Class.field" -> JSON value. Empty if all settings are at their
    defaults."""
    refusals: Mapping[str, str]
    """Settings that prevent sharing, as "Class.field" -> reason. Empty if entries can be shared."""

    def __or__(self, other: SettingsVerdict) -> SettingsVerdict:
        return SettingsVerdict({**self.overrides, **other.overrides}, {**self.refusals, **other.refusals})

    def overrides_or_raise(self) -> dict[str, Any]:
        """Return the overrides. If settings prevent sharing, raises CheckpointError("settings") with the name
        of every such field."""
        if self.refusals:
            raise CheckpointError(
                "these settings prevent sharing:  "
                + "; ".join(f"{name}: {why}" for name, why in sorted(self.refusals.items())),
                reason="settings",
            )
        return dict(self.overrides)


def judge_fields(
    tables: FieldTables, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> SettingsVerdict:
    """Return the verdict on the fields of one config class. `values` are the resolved values, and `defaults`
    the default values.

    A field without a default counts as set. If a value would become part of the key but has no JSON form, the
    field prevents sharing.
    """
    overrides: dict[str, Any] = {}
    refusals: dict[str, str] = {}
    for name, value in values.items():
        where = tables.in_key.get(name)
        if name in tables.harmless or (where is not None and where != AS_OVERRIDE):
            continue
        if name in defaults and _is_same_value(value, defaults[name]):
            continue
        full = f"{tables.class_name}.{name}"
        if _is_default_equivalent(tables, name, value):
            continue
        if where is None:
            refusals[full] = tables.refused.get(
                name,
                _UNKNOWN_SETTING,
            )
            continue
        try:
            overrides[full] = to_json_value(value)
        except TypeError as e:
            refusals[full] = f"cornplug cannot identify its value: {e}"
    return SettingsVerdict(overrides, refusals)


def find_misplaced(tables: FieldTables, fields: Iterable[str]) -> dict[str, str]:
    """Return the errors in the tables that classify the fields of a config class, by field name: fields that
    are in no table or in several tables, and fields that the class does not have. Used by tests."""
    existing = set(fields)
    places = (tables.in_key, tables.harmless, tables.refused)
    found = {name: sum(name in place for place in places) for name in existing}
    wrong = {name: "not in any table" for name, count in found.items() if count == 0}
    wrong |= {name: "in more than one table" for name, count in found.items() if count > 1}
    listed = {name for place in (*places, tables.same_as_default) for name in place}
    return wrong | dict.fromkeys(
        listed - existing - tables.release_dependent, f"{tables.class_name} has no such field"
    )


def default_values(config_class: Any) -> dict[str, Any]:
    """Return the default value of each field of a dataclass, including pydantic's `Field(default=...)`.
    Fields whose default needs an instance are left out."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(config_class):
        default, factory = one.default, one.default_factory
        if default is not dataclasses.MISSING and hasattr(default, "is_required"):
            if default.is_required():
                continue
            factory = default.default_factory or dataclasses.MISSING
            default = dataclasses.MISSING if default.default_factory else default.default
        made = _default_value(default, factory)
        if made is not dataclasses.MISSING:
            found[one.name] = made
    return found


def to_json_value(value: Any) -> Any:
    """Return the JSON form of a value, with enums, sets and dataclasses converted. Raises TypeError if the
    value has no JSON form."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping has keys that are not strings")
        return {key: to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((to_json_value(inner) for inner in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_json_value(getattr(value, one.name, None)) for one in dataclasses.fields(value)}
    raise TypeError(f"a {type(value).__name__}")


def _is_same_value(value: Any, other: Any) -> bool:
    try:
        # Compare the JSON text, because Python treats True, 1 and 1.0 as equal.
        return json.dumps(to_json_value(value), sort_keys=True) == json.dumps(
            to_json_value(other), sort_keys=True
        )
    except TypeError:
        return value is other


def _is_default_equivalent(tables: FieldTables, name: str, value: Any) -> bool:
    return any(_is_same_value(value, known) for known in tables.same_as_default.get(name, ()))


def _default_value(default: Any, factory: Callable[[], Any] | Any) -> Any:
    if default is not dataclasses.MISSING:
        return default
    return dataclasses.MISSING if factory is dataclasses.MISSING else factory()


def config_changes(patched: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that an engine made to a config, as "path.of.field" -> the engine's value, or None
    for a removed field.

    `patched` is the config that the engine runs. `original` is the config that transformers reads from the
    files. Both are results of transformers' `to_dict`. Fields without effect are left out. Raises
    CheckpointError("overrides") for a value without a canonical form.
    """
    ours, theirs = dict(_iter_leaves(patched)), dict(_iter_leaves(original))
    found: dict[str, Any] = {}
    named, published = patched.get("architectures"), original.get("architectures")
    if named != published and (published or unusual_classes(patched)):
        # The model's usual class is not a change, even if config.json does not name a class.
        found["architectures"] = [str(name) for name in named or ()]
    for path in sorted(ours.keys() | theirs.keys()):
        if path in ours and path in theirs and _is_equal(ours[path], theirs[path]):
            continue
        try:
            # Config classes do not distinguish None from an absent field.
            found[path] = to_json_value(ours.get(path))
        except TypeError as e:
            raise CheckpointError(
                f"cannot identify the model's config: {path} is {e}", reason="overrides"
            ) from e
    return found


def tower_changes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config_changes` that can affect a tower or projector. These are all entries
    except changes to the text config."""
    return {path: value for path, value in found.items() if not path.startswith(_TEXT_PREFIXES)}


def language_model_changes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config_changes` that can affect KV. These are all entries except changes to
    towers, which already affect the keys of media."""
    return {path: value for path, value in found.items() if not _TOWER_PATH.match(path)}


def depends_on_length(*configs: Mapping[str, Any]) -> bool:
    """Return whether a model's KV may depend on the engine's maximum sequence length.

    `configs` are the text config from `Checkpoint.kv_spec`, and further configs, such as the engine's
    complete config. Rotary embeddings at any depth of these configs are checked.
    """
    if str(configs[0].get("model_type")) not in _MODELS_OF_ANY_LENGTH:
        return True
    return any(
        path.rpartition(".")[2] in ("rope_type", "type")
        and value is not None
        and str(value) not in _ROPES_OF_ANY_LENGTH
        for config in configs
        for path, value in _iter_leaves(config)
        if "rope" in path
    )


def remote_code_digest(folder: Path) -> str | None:
    """Return the digest of the Python code in a checkpoint's folder, or None if the checkpoint's JSON files
    reference no code.

    Call it for engines that run this code (`trust_remote_code`). Raises CheckpointError("remote_code") if the
    code is in another repository, because any version of that code may run.
    """
    named = {name: found for name in _JSON_WITH_CODE if (found := _code_references(folder / name))}
    if not named:
        return None
    for name, found in named.items():
        if "--" in repr(found):
            raise CheckpointError(
                f"{folder / name} runs code from another repository; download the code into the folder",
                reason="remote_code",
            )
    parts = []
    for file in sorted(folder.rglob("*.py")):
        try:
            parts += [str(file.relative_to(folder)).encode(), file.read_bytes()]
        except OSError as e:
            raise CheckpointError(f"cannot read {file}: {e.strerror}", reason="remote_code") from e
    return digest("cornplug-remote-code-v1", repr(sorted(named.items())).encode(), *parts).hex()


def _code_references(file: Path) -> Any:
    content = read_json(file) or {}
    found = {
        path: value for path, value in _iter_leaves(content, inert=True) if "auto_map" in path.split(".")
    }
    return sorted(found.items(), key=repr)


def _iter_leaves(
    config: Mapping[str, Any], prefix: str = "", *, inert: bool = False
) -> Iterator[tuple[str, Any]]:
    for name, value in (config if inert else without_inert(config)).items():
        if isinstance(value, Mapping) and value:
            yield from _iter_leaves(value, f"{prefix}{name}.", inert=inert)
        else:
            yield f"{prefix}{name}", value


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
