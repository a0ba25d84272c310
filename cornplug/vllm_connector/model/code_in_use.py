"""Checks whether vLLM's own classes run this model, and not those of a plugin."""

from __future__ import annotations

import sys
from typing import Any, Final

from cornplug.engine_common.allow_lists import SettingsVerdict

_OURS: Final = ("vllm.model_executor.models.", "vllm.models.", "vllm.multimodal.")


def verdict(model: Any) -> SettingsVerdict:
    """Refusals for model classes and processors that are not vLLM's own. `model` is its ModelConfig.

    A class that replaces one of vLLM's classes counts for every model, because nested towers and language
    models are looked up in the same registry.
    """
    registry = getattr(model, "registry", None)
    if registry is None:
        return SettingsVerdict({}, {})
    from vllm.model_executor.models.registry import _VLLM_MODELS

    chosen = getattr(model, "architecture", None)
    refusals: dict[str, str] = {}
    for name, registered in registry.models.items():
        module = _module_of(registered)
        if module.startswith(_OURS):
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
    """Module of a part of the model's multimodal processor that is not vLLM's, or None.

    A plugin that registers a processor imports the model's class first, so the class is found in
    `sys.modules`.
    """
    if registered is None:
        return None
    module = sys.modules.get(_module_of(registered))
    name = getattr(registered, "class_name", None) or registered.model_cls.__name__
    factories = getattr(getattr(module, name, None), "_processor_factory", None)
    parts = [getattr(factories, part, None) for part in ("info", "processor", "dummy_inputs")]
    found = [str(getattr(part, "__module__", "")) for part in parts if part is not None]
    return next((where for where in found if not where.startswith(_OURS)), None)
