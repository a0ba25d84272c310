"""Checks a vLLM engine's settings against the tables of its config classes, to decide whether the engine can
share.

This module also checks that vLLM's own classes, and not a plugin's classes, run the model.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cornplug.checkpoints.model_family import PRECISION_VARIABLES
from cornplug.engine_common.engine_config import (
    FieldTables,
    SettingsVerdict,
    default_values,
    judge_fields,
    to_json_value,
)
from cornplug.engine_common.model_identity import declares_quantisation
from cornplug.vllm_connector.model.model_fields import (
    CACHE,
    HARMLESS_LOADER_OPTIONS,
    HARMLESS_VARIABLES,
    HUB_VARIABLE,
    LOAD,
    LORA,
    MAMBA,
    MODEL,
    MULTIMODAL,
    PARALLEL,
    REFUSED_VARIABLES,
    SPECULATIVE,
)
from cornplug.vllm_connector.model.runtime_fields import (
    ATTENTION,
    COMPILATION,
    DIFFUSION,
    EC_MANAGER,
    ENGRAM,
    HARMLESS_INDUCTOR,
    IR_OPS,
    KERNEL,
    OFFLOAD,
    PASSES,
    SCHEDULER,
    SHAPES,
    VLLM,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_VLLM_MODULES: Final = ("vllm.model_executor.models.", "vllm.models.", "vllm.multimodal.")


def judge_common(config: VllmConfig) -> SettingsVerdict:
    """Return the verdict on settings that change both embeddings and KV.

    Covers the settings for the model, loading, parallelism, kernels, compilation, code and environment.
    """
    from vllm.config import LoadConfig, ModelConfig, ParallelConfig

    found = _judge_class(MODEL, ModelConfig, config.model_config) | _judge_model(config.model_config)
    found |= _judge_class(LOAD, LoadConfig, config.load_config) | _judge_loader(config.load_config)
    found |= _judge_parallel(ParallelConfig, getattr(config, "parallel_config", None))
    found |= _judge_runtime(config) | _judge_compilation(getattr(config, "compilation_config", None))
    return found | judge_code(config.model_config) | _judge_environment(config)


def judge_embeddings(config: VllmConfig) -> SettingsVerdict:
    """Return the verdict on settings that change only embeddings. KV depends on embedding keys, so these
    settings also affect KV."""
    from vllm.config import MultiModalConfig

    return _judge_class(MULTIMODAL, MultiModalConfig, config.model_config.multimodal_config)


def judge_kv(config: VllmConfig) -> SettingsVerdict:
    """Return the verdict on settings that change only KV."""
    from vllm.config import CacheConfig, LoRAConfig, MambaConfig, SpeculativeConfig

    cache = _judge_class(CACHE, CacheConfig, getattr(config, "cache_config", None))
    states = _judge_class(MAMBA, MambaConfig, getattr(config, "mamba_config", None))
    drafts = _judge_class(SPECULATIVE, SpeculativeConfig, getattr(config, "speculative_config", None))
    lora = getattr(config, "lora_config", None)
    values = _field_values(LoRAConfig, lora)
    if getattr(lora, "lora_dtype", None) in ("auto", config.model_config.dtype):
        values["lora_dtype"] = "auto"
    elif lora is not None:
        values["lora_dtype"] = str(lora.lora_dtype)
    return cache | states | drafts | judge_fields(LORA, values, default_values(LoRAConfig))


def judge_code(model: Any) -> SettingsVerdict:
    """Return a verdict that prevents sharing if a model class or processor is not vLLM's own. `model` is
    vLLM's ModelConfig.

    If a plugin replaces any of vLLM's classes, no model is shared, because nested towers and language models
    are looked up in the same registry.
    """
    registry = getattr(model, "registry", None)
    if registry is None:
        return SettingsVerdict({}, {})
    from vllm.model_executor.models.registry import _VLLM_MODELS

    chosen = getattr(model, "architecture", None)
    refusals: dict[str, str] = {}
    for name, registered in registry.models.items():
        module = _module_of(registered)
        if module.startswith(_VLLM_MODULES):
            continue
        if name == chosen or name in _VLLM_MODELS:
            refusals[f"model class {name}"] = f"it is defined by {module}, not by vLLM"
    if processor := _foreign_processor(registry.models.get(chosen)):
        refusals["processor"] = f"it is defined by {processor}, not by vLLM"
    return SettingsVerdict({}, refusals)


def transformers_backend(model: Any) -> str | None:
    """Return "transformers" if vLLM has no class for the model and runs transformers' code, else None."""
    registry = getattr(model, "registry", None)
    found = registry.models.get(model.architecture) if registry is not None else None
    inside = found is not None and ".transformers" in _module_of(found).removeprefix("vllm")
    return "transformers" if inside else None


def _module_of(registered: Any) -> str:
    lazy = getattr(registered, "module_name", None)
    return str(lazy or registered.model_cls.__module__)


def _foreign_processor(registered: Any) -> str | None:
    """Return the module that defines a part of the model's multimodal processor, if the module is not vLLM's.
    Return None otherwise.

    A plugin that registers a processor first imports the model's class. Therefore the class is in
    `sys.modules`.
    """
    if registered is None:
        return None
    module = sys.modules.get(_module_of(registered))
    name = getattr(registered, "class_name", None) or registered.model_cls.__name__
    factories = getattr(getattr(module, name, None), "_processor_factory", None)
    parts = [getattr(factories, part, None) for part in ("info", "processor", "dummy_inputs")]
    found = [str(getattr(part, "__module__", "")) for part in parts if part is not None]
    return next((where for where in found if not where.startswith(_VLLM_MODULES)), None)


def _field_values(config_class: Any, instance: Any) -> dict[str, Any]:
    names = (one.name for one in dataclasses.fields(config_class))
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


def _judge_class(tables: FieldTables, config_class: Any, instance: Any) -> SettingsVerdict:
    return judge_fields(tables, _field_values(config_class, instance), default_values(config_class))


def _judge_model(model: Any) -> SettingsVerdict:
    overrides: dict[str, Any] = {}
    refusals: dict[str, str] = {}
    if callable(model.hf_overrides):
        refusals["ModelConfig.hf_overrides"] = (
            "its value is a function, whose effect cornplug cannot identify"
        )
    if model.quantization and not declares_quantisation(model.hf_config):
        overrides["ModelConfig.quantization"] = str(model.quantization)
    if getattr(model, "runner_type", "generate") != "generate":
        refusals["ModelConfig.runner"] = MODEL.refused["runner"]
    return SettingsVerdict(overrides, refusals)


def _judge_loader(load: Any) -> SettingsVerdict:
    options = getattr(load, "model_loader_extra_config", None) or {}
    unknown = (
        sorted(set(options) - HARMLESS_LOADER_OPTIONS) if isinstance(options, Mapping) else ["its class"]
    )
    if not unknown:
        return SettingsVerdict({}, {})
    why = f"the loader's options may change which weights it reads: {', '.join(map(str, unknown))}"
    return SettingsVerdict({}, {"LoadConfig.model_loader_extra_config": why})


def _judge_parallel(config_class: Any, parallel: Any) -> SettingsVerdict:
    values = _field_values(config_class, parallel)
    # A class from vLLM counts as the default, whether the platform or the operator selected it.
    for name in ("worker_cls", "distributed_executor_backend"):
        value = values.get(name)
        where = value if isinstance(value, str) else getattr(value, "__module__", "")
        if where.startswith("vllm."):
            del values[name]
    return judge_fields(PARALLEL, values, default_values(config_class))


def _judge_runtime(config: Any) -> SettingsVerdict:
    """Return the verdict on kernels, attention, scheduling, the smaller config classes, and VllmConfig's own
    fields."""
    from vllm import config as classes
    from vllm.config import VllmConfig
    from vllm.config.diffusion import DiffusionConfig
    from vllm.config.ec_manager_config import EncoderCacheManagerConfig
    from vllm.config.engram import EngramConfig
    from vllm.config.kernel import IrOpPriorityConfig

    def of(name: str) -> Any:
        return getattr(config, name, None)

    found = judge_fields(VLLM, _field_values(VllmConfig, config), {"additional_config": {}})
    attention = _field_values(classes.AttentionConfig, of("attention_config"))
    backend = attention.get("backend")
    if backend is not None:
        # Compare backends by name. The enum's value is a class path, which operators may replace for some
        # names.
        attention["backend"] = getattr(backend, "name", backend)
    found |= judge_fields(ATTENTION, attention, default_values(classes.AttentionConfig))
    kernel = of("kernel_config")
    for tables, config_class, value in (
        (KERNEL, classes.KernelConfig, kernel),
        (IR_OPS, IrOpPriorityConfig, getattr(kernel, "ir_op_priority", None)),
        (SCHEDULER, classes.SchedulerConfig, of("scheduler_config")),
        (OFFLOAD, classes.OffloadConfig, of("offload_config")),
        (ENGRAM, EngramConfig, of("engram_config")),
        (DIFFUSION, DiffusionConfig, of("diffusion_config")),
        (EC_MANAGER, EncoderCacheManagerConfig, of("ec_manager_config")),
    ):
        found |= _judge_class(tables, config_class, value)
    return found


def _judge_compilation(compilation: Any) -> SettingsVerdict:
    from vllm.config import CompilationConfig
    from vllm.config.compilation import DynamicShapesConfig, PassConfig

    found = _judge_class(COMPILATION, CompilationConfig, compilation)
    found |= _judge_class(PASSES, PassConfig, getattr(compilation, "pass_config", None))
    found |= _judge_class(SHAPES, DynamicShapesConfig, getattr(compilation, "dynamic_shapes_config", None))
    options = getattr(compilation, "inductor_compile_config", None) or {}
    name = "CompilationConfig.inductor_compile_config"
    counted = {key: value for key, value in options.items() if key not in HARMLESS_INDUCTOR}
    if not counted:
        return found
    try:
        return found | SettingsVerdict({name: to_json_value(counted)}, {})
    except TypeError as e:
        return found | SettingsVerdict({}, {name: f"cornplug cannot identify its value: {e}"})


def _judge_environment(config: Any) -> SettingsVerdict:
    from vllm import envs

    known = sorted(name for name in envs.environment_variables if name.startswith("VLLM_"))
    known += PRECISION_VARIABLES
    given = {name: os.environ[name] for name in known if name in os.environ}
    counted = {n: v for n, v in given.items() if v and not HARMLESS_VARIABLES.fullmatch(n)}
    if _are_models_local(config):
        counted.pop(HUB_VARIABLE, None)
    refusals = {f"environment {n}": REFUSED_VARIABLES[n] for n in counted if n in REFUSED_VARIABLES}
    return SettingsVerdict({f"environment {n}": v for n, v in counted.items()}, refusals)


def _are_models_local(config: Any) -> bool:
    """Return whether the model and the draft model (if any) are local folders."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    models = [config.model_config.model, *([draft.model] if draft is not None else [])]
    return all(Path(model).is_dir() for model in models)
