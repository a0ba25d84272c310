"""Identity of the model that SGLang runs, computed from SGLang's settings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common import engine_state
from cornplug.engine_common.engine_config import judge_fields, remote_code_digest
from cornplug.engine_common.model_identity import EngineModel, InitialModel, declares_quantisation
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks.compat import EPOCHS, GENERIC_INPUTS, validated_families
from cornplug.sglang_hooks.model import environment
from cornplug.sglang_hooks.model.server_args_fields import QUANTISED_WEIGHT_FIELDS, SERVER_ARGS

READS_SAFETENSORS: Final = frozenset(
    {"auto", "fastsafetensors", "instanttensor", "runai_streamer", "safetensors"}
)
"""SGLang's load formats that read only the checkpoint's safetensors."""

_READ_SPEED_KEYS: Final = frozenset({"concurrency", "enable_multithread_load", "memory_limit", "num_threads"})
"""Keys of `--model-loader-extra-config` that only affect the speed of reading the files."""
_DRAFT_SOURCES: Final = frozenset({"speculative_draft_model_path", "speculative_draft_model_revision"})
"""Settings that only locate a draft model's files. The draft's fingerprint covers the content of these
files."""
_PROCESSOR_KEYS: Final = ("backend", "device", "use_fast")
_PLUGINS: Final = ("sglang.srt.platforms", "sglang.srt.plugins")
_started: Final = InitialModel()


def engine_model() -> EngineModel:
    """Return the description of this process's engine model, from the settings that SGLang has published
    here.

    After a weight update, the result describes the new weights. Raises CheckpointError if the model cannot be
    identified: "load_format", "settings", "overrides", or "no_settings" if SGLang has not published its
    settings yet. Also raises the same errors as `Checkpoint.open` and `InitialModel.current`.
    """
    return _started.current(_describe_running)


def started_model() -> InitialModel:
    """Return the description of the model with which this process's engine started."""
    return _started


def _describe_running() -> EngineModel:
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.runtime_context import get_server_args

    try:
        server_args = get_server_args()
    except ValueError as e:
        raise CheckpointError(
            f"SGLang's configuration is not available yet: {e}", reason="no_settings"
        ) from e
    return describe(resolved_view(server_args), model_config_of(server_args))


def describe(settings: Any, model: Any) -> EngineModel:
    """Return the description of a model from SGLang's resolved settings and its ModelConfig.

    Raises the same errors as `engine_model`.
    """
    _check_sources(settings, model)
    checkpoint = Checkpoint.open(model.model_path, model.revision)
    return EngineModel(
        checkpoint=checkpoint,
        dtype=dtype_name(model.dtype),
        max_model_len=model.context_len,
        processor_kwargs=dict((settings.mm_process_config or {}).get("image") or {}),
        engine="sglang",
        validated_families=validated_families(dtype_name(model.dtype)),
        generic_inputs=GENERIC_INPUTS,
        began_ns=engine_state.current().start_ns(),
        epochs=EPOCHS,
        overrides=_overrides(settings, model, checkpoint),
    )


def runs_generic_backend(model: Any) -> bool:
    """Return whether SGLang runs a model (its ModelConfig) with transformers' classes."""
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    return bool(get_resolved_model_impl(model) == ModelImpl.TRANSFORMERS)


def draft_model(draft: Any) -> EngineModel:
    """Return the description of this process's draft model, from its ModelConfig in SGLang.

    Every setting for speculative decoding is part of the key, because it may change the draft model's KV.
    Raises the same errors as `engine_model`.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings = resolved_view(get_server_args())
    alone = describe(settings, draft)
    values, defaults = _fields(settings)
    chosen = {
        name: values[name]
        for name in sorted(values)
        if name.startswith("speculative_") and name not in _DRAFT_SOURCES and values[name] != defaults[name]
    }
    return dataclasses.replace(alone, overrides={**alone.overrides, "sglang_draft": chosen})


def _check_sources(settings: Any, model: Any) -> None:
    """Raise CheckpointError("load_format") unless weights come from the checkpoint's safetensors."""
    if settings.load_format not in READS_SAFETENSORS:
        raise CheckpointError(
            f"load format {settings.load_format!r} may read more than the checkpoint's safetensors, so "
            f"cornplug cannot identify the weights. Supported: {', '.join(sorted(READS_SAFETENSORS))}.",
            reason="load_format",
        )
    elsewhere = ["a pointer head"] if model.pointer_head is not None else []
    if settings.download_dir and not Path(model.model_path).is_dir():
        elsewhere.append(
            "--download-dir, where cornplug does not look for checkpoints; pass a folder as the model"
        )
    extra = settings.model_loader_extra_config or {}
    extra = json.loads(extra) if isinstance(extra, str) else extra
    if unknown := sorted(extra.keys() - _READ_SPEED_KEYS):
        elsewhere.append(f"--model-loader-extra-config {', '.join(unknown)}")
    if elsewhere:
        raise CheckpointError(
            "cornplug cannot identify the model's weights, because the server may load weights from outside "
            f"the checkpoint: {', '.join(elsewhere)}",
            reason="load_format",
        )


def _overrides(settings: Any, model: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings that change computed values, by name.

    SGLang's config at run time cannot be compared with config.json, because SGLang adds sizes to every
    config. Only `--json-model-override-args` changes values from the files.
    """
    values, defaults = _fields(settings)
    quantised = bool(settings.quantization) or declares_quantisation(model.hf_config)
    variables = environment.classify_environment(is_local=_is_local(settings, model))
    found = (judge_fields(SERVER_ARGS, values, defaults) | variables).overrides_or_raise()
    if quantised:
        chosen = {name: values[name] for name in QUANTISED_WEIGHT_FIELDS if values[name] != defaults[name]}
        found |= {f"{SERVER_ARGS.class_name}.{name}": value for name, value in chosen.items()}
    asked = (settings.mm_process_config or {}).get("image") or {}
    if libraries := {name: asked[name] for name in _PROCESSOR_KEYS if name in asked}:
        # With these arguments, vLLM loads another image processor. SGLang passes them to its current image
        # processor.
        found[f"{SERVER_ARGS.class_name}.mm_process_config"] = libraries
    if overridden := json.loads(settings.json_model_override_args):
        found["hf_overrides"] = overridden
    if settings.quantization and not declares_quantisation(model.hf_config):
        # If an engine quantises weights while it loads them, the values are specific to the engine, because
        # scales and rounding differ.
        found["sglang_quantization"] = str(settings.quantization)
    if settings.trust_remote_code and (code := remote_code_digest(checkpoint.path)):
        found["remote_code"] = code
    if plugins := _other_plugins():
        found["sglang_plugins"] = plugins
    return found


def _is_local(settings: Any, model: Any) -> bool:
    """Return whether the files of the model and of its draft model are on this host.

    Files that were downloaded from a hub count as on this host.
    """
    named = (model.model_path, settings.speculative_draft_model_path, settings.speculative_token_map)
    return all(Path(one).exists() for one in named if one)


def _fields(settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (values, defaults) of SGLang's ServerArgs, by field name."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for field in msgspec.structs.fields(ServerArgs):
        if field.default is not msgspec.NODEFAULT:
            defaults[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            defaults[field.name] = field.default_factory()
        value = getattr(settings, field.name)
        # SGLang resolves some unset lists to empty lists.
        unset = defaults.get(field.name, value) is None and value in ([], {})
        values[field.name] = None if unset else value
    return values, defaults


def _other_plugins() -> list[str]:
    """Return the names and versions of SGLang plugins other than cornplug.

    A plugin may replace any of SGLang's functions, so only servers with the same plugins share.
    """
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    found = set()
    for group in _PLUGINS:
        for point in importlib.metadata.entry_points(group=group):
            if allowed and point.name not in allowed:
                continue
            of = f"{point.dist.name}=={point.dist.version}" if point.dist else point.value
            if not of.startswith(("cornplug==", "cornplug-dev-")):
                found.add(of)
    return sorted(found)
