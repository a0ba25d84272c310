"""Detection of differences between the config that an engine runs and a checkpoint's config.json.

Engines with equal checkpoint files must compute equal keys. Therefore the config that an engine runs (which
may be patched or overridden) is compared with the config that transformers reads from the same files, and
every difference becomes part of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints.checkpoint import read_json
from cornplug.checkpoints.families import unusual_classes, without_inert
from cornplug.engine_common.allow_lists import plain
from cornplug.errors import CheckpointError
from cornplug.identity import digest

_ROPES_OF_ANY_LENGTH: Final = frozenset({"default", "linear", "llama3", "mrope", "yarn", "axial"})
"""Types of rotary embeddings whose tables depend only on the config, in both engines, and not on the maximum
sequence length."""

_ANY_LENGTH: Final = """
chatglm cohere cohere2 deepseek_v2 deepseek_v3 exaone falcon gemma gemma2 gemma3 glm glm4 gpt_neox gpt_oss
granite internlm2 internvl llama llava llava_next llava_onevision mistral mixtral olmo olmo2 phi phi3
qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe smollm3 starcoder2
"""
_MODELS_OF_ANY_LENGTH: Final = frozenset(_ANY_LENGTH.split())
"""`model_type`s of text models whose code in vLLM 0.32 and SGLang 0.5.23 does not read the maximum sequence
length. Not included are, for example, Llama 4, which scales its attention by this length, and Plamo 3 and
MiniMax-M2, which size their tables by it."""

_JSON_WITH_CODE: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
_TEXT: Final = ("text_config.", "llm_config.")
_TOWERS: Final = re.compile(r"(vision|audio|visual|speech)[a-z_]*(config|_cfg)\.")


def changes(patched: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that an engine made to a config, as "path.of.field" -> the engine's value, or None
    for a removed field.

    `patched` is the config that the engine runs, and `read` the config that transformers reads. Both are
    results of transformers' `to_dict`. Fields without effect are left out. Raises
    CheckpointError("overrides") for a value without a canonical form.
    """
    ours, theirs = dict(_leaves(patched)), dict(_leaves(read))
    found: dict[str, Any] = {}
    named, published = patched.get("architectures"), read.get("architectures")
    if named != published and (published or unusual_classes(patched)):
        # If config.json does not name a class, the model's usual class is not a change.
        found["architectures"] = [str(name) for name in named or ()]
    for path in sorted(ours.keys() | theirs.keys()):
        if path in ours and path in theirs and _equal(ours[path], theirs[path]):
            continue
        try:
            # Config classes do not distinguish None from an absent field.
            found[path] = plain(ours.get(path))
        except TypeError as e:
            raise CheckpointError(
                f"cannot identify the model's config: {path} is {e}", reason="overrides"
            ) from e
    return found


def of_towers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `changes` that can affect a tower or projector. These are all entries except
    changes to the text config."""
    return {path: value for path, value in found.items() if not path.startswith(_TEXT)}


def of_language_model(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `changes` that can affect KV. These are all entries except changes to towers,
    which already affect the keys of media."""
    return {path: value for path, value in found.items() if not _TOWERS.match(path)}


def length_matters(*configs: Mapping[str, Any]) -> bool:
    """Return whether a model's KV may depend on the engine's maximum sequence length.

    `configs` are the text config from `Checkpoint.kv_spec`, and further configs, such as the complete config
    that the engine runs. A rotary embedding that depends on the length counts at any depth.
    """
    if str(configs[0].get("model_type")) not in _MODELS_OF_ANY_LENGTH:
        return True
    return any(
        path.rpartition(".")[2] in ("rope_type", "type")
        and value is not None
        and str(value) not in _ROPES_OF_ANY_LENGTH
        for config in configs
        for path, value in _leaves(config)
        if "rope" in path
    )


def remote_code(folder: Path) -> str | None:
    """Return the digest of the Python code in a checkpoint's folder, or None if the checkpoint's JSON files
    do not refer to code.

    Call it for engines that run this code (`trust_remote_code`). Raises CheckpointError("remote_code") if the
    code is in another repository, because any version of that code may run.
    """
    named = {name: found for name in _JSON_WITH_CODE if (found := _code_of(folder / name))}
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


def _code_of(file: Path) -> Any:
    content = read_json(file) or {}
    found = {path: value for path, value in _leaves(content, inert=True) if "auto_map" in path.split(".")}
    return sorted(found.items(), key=repr)


def _leaves(config: Mapping[str, Any], prefix: str = "", *, inert: bool = False) -> Iterator[tuple[str, Any]]:
    for name, value in (config if inert else without_inert(config)).items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.", inert=inert)
        else:
            yield f"{prefix}{name}", value


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
