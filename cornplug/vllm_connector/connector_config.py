"""Configuration of an engine with those of cornplug's connectors that stock vLLM accepts.

vLLM rejects KV connectors in combination with some features, in some cases only late during an engine's
start. A command line that works without cornplug must also work with `--kv-connector cornplug`. Therefore a
connector that vLLM rejects (KV, embeddings or both) is left out of the configuration. A log line names the
connector and the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from cornplug.config import EMBEDDINGS_BY_VALUE, dump_portable
from cornplug.engine_common import engine_state
from cornplug.engine_common.shared_flags import load_settings
from cornplug.sharing_verdict import summarize_error
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR
from cornplug.vllm_connector.flags import (
    add_offloading,
    all_our_settings,
    child_connectors,
    has_ours,
    is_ours,
    our_settings,
)
from cornplug.vllm_connector.media import partial_models

_RECOMPUTE_POLICY: Final = "recompute"
_PRODUCER_ROLE: Final = "ec_producer"

# vLLM's configuration classes raise these exceptions for unsupported combinations of settings. pydantic's
# ValidationError is a ValueError.
_VLLM_ERRORS: Final = (ValueError, AssertionError, NotImplementedError, RuntimeError)

_kv_refusals: Final[list[str]] = []
"""Reason why the most recently created VllmConfig does not include cornplug's KV connector, as the only
item. Empty if the VllmConfig includes the connector."""


def kv_refusal() -> str:
    """Return the reason why the most recently created VllmConfig of this process does not share KV. Returns
    "" if it shares KV, or if cornplug was not configured."""
    return _kv_refusals[0] if _kv_refusals else ""


def create_engine_config(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Create the VllmConfig for these engine arguments, with each of cornplug's connectors that vLLM accepts.

    If vLLM rejects the arguments even without cornplug, vLLM's own error is raised.
    """
    _kv_refusals.clear()
    if not _uses_cornplug(args):
        return original(args, *rest, **kwargs)
    engine_state.record_engine_start()
    _replace_offloading_size(args)
    # vLLM sets this flag itself for every engine with a connector that loads embeddings. Read the user's
    # value first.
    by_value = bool(getattr(args, "enable_mm_embeds", False))
    without_tower = partial_models.exclude_tower(args)
    # vLLM writes resolved values into the arguments, so a second attempt needs a copy of the original
    # arguments.
    given = copy.deepcopy(args)

    def without(*names: str) -> Any:
        fewer = copy.deepcopy(given)
        for name in names:
            setattr(fewer, name, None)
        return original(fewer, *rest, **kwargs)

    alone = _create_encoder_only(given, lambda fewer: original(fewer, *rest, **kwargs))
    try:
        config = alone or original(args, *rest, **kwargs)
    except _VLLM_ERRORS as refused:
        config = _create_without_rejected(without, given, refused)
    else:
        reason = kv_connector_problem(config)
        if reason and is_ours(config.kv_transfer_config):
            _record_kv_refusal("cornplug: KV of this engine is not shared: %s", reason)
            config = without("kv_transfer_config")
    if by_value:
        _store_mm_embeds_flag(config)
    _adjust_connectors(config)
    _complete_settings(config)
    if without_tower:
        partial_models.check_model(config)
    return config


def _create_encoder_only(args: Any, create_config: Callable[[Any], Any]) -> Any | None:
    """Create the VllmConfig for an engine that runs only its multimodal encoder. Returns None for any other
    engine, and if vLLM rejects the configuration.

    The connector's role determines which model runner vLLM uses. With a role that may load embeddings, the
    runner calls the language model, which `--mm-encoder-only` does not load.
    """
    ec = args.ec_transfer_config
    asked = args.mm_encoder_only or (_is_our_ec(ec) and ec.ec_role == _PRODUCER_ROLE)
    if not asked:
        return None
    fewer = copy.deepcopy(args)
    if is_ours(fewer.kv_transfer_config):
        fewer.kv_transfer_config = None
    if _is_our_ec(ec):
        fewer.ec_transfer_config.ec_role = _PRODUCER_ROLE
        if fewer.mm_processor_device == "auto" and fewer.mm_tensor_ipc == "torch_shm":
            # vLLM would preprocess images on a producer's GPU. The producer's pixel values would then differ
            # from the consumers' pixel values.
            fewer.mm_processor_device = "cpu"
    try:
        config = create_config(fewer)
    except _VLLM_ERRORS:
        return None
    if not config.is_mm_encoder_only:
        return None
    _kv_refusals[:] = ["this engine runs the encoder only"]
    compat.logger.info("cornplug: %s, so there is no KV to share", _kv_refusals[0])
    return config


def measure_encoder_output_widths(original: Callable[..., Any], config: Any, *rest: Any) -> None:
    """Skip vLLM's measurement of embedding widths for cornplug, which knows the widths from the model's
    config.

    Other encoder-cache connectors use the measured widths as the sizes of their transfers. To measure widths,
    vLLM encodes a dummy item of each modality. This fails if no modality is enabled: if all multimodal limits
    are 0, or if the engine runs only the language model.
    """
    ec = config.ec_transfer_config
    if ec is None or ec.ec_connector != EC_CONNECTOR:
        original(config, *rest)


def _uses_cornplug(args: Any) -> bool:
    return has_ours(getattr(args, "kv_transfer_config", None)) or _is_our_ec(
        getattr(args, "ec_transfer_config", None)
    )


def _is_our_ec(ec: Any) -> bool:
    return ec is not None and ec.ec_connector == EC_CONNECTOR


def _replace_offloading_size(args: Any) -> None:
    """Replace `--kv-offloading-size` by a connector next to cornplug. Otherwise vLLM would silently replace
    cornplug by its offloading connector."""
    if args.kv_offloading_size is None or not has_ours(args.kv_transfer_config):
        return
    args.kv_transfer_config = add_offloading(
        args.kv_transfer_config, args.kv_offloading_size, args.kv_offloading_backend
    )
    args.kv_offloading_size = None


def _create_without_rejected(create_without: Callable[..., Any], args: Any, error: Exception) -> Any:
    """Create the VllmConfig again without the connectors that vLLM rejects. Leave out as few connectors as
    possible."""
    if is_ours(args.kv_transfer_config):
        try:
            config = create_without("kv_transfer_config")
        except _VLLM_ERRORS:
            pass
        else:
            _record_kv_refusal(
                "cornplug: KV of this engine is not shared, because vLLM rejects a KV connector with this "
                "configuration: %s",
                error,
            )
            return config
    if not _is_our_ec(args.ec_transfer_config):
        raise error
    names = ["ec_transfer_config"]
    if is_ours(args.kv_transfer_config):
        names.append("kv_transfer_config")
    # If vLLM also rejects the arguments without cornplug, this call raises vLLM's own error.
    config = create_without(*names)
    _record_kv_refusal(
        "cornplug: this engine shares nothing, because vLLM rejects cornplug's connectors with this "
        "configuration: %s",
        error,
    )
    return config


def _record_kv_refusal(message: str, reason: object) -> None:
    compat.logger.warning(message, reason)
    _kv_refusals[:] = [summarize_error(reason) if isinstance(reason, Exception) else str(reason)]


def kv_connector_problem(config: Any) -> str | None:
    """Return the reason why an engine with this configuration cannot start with a KV connector, or None if it
    can. Covers only reasons that vLLM detects late during an engine's start."""
    if config.model_config.is_encoder_decoder:
        return "vLLM does not support KV connectors for encoder-decoder models"
    backend = config.attention_config.backend
    if backend is not None:
        try:
            supported = backend.get_class().supports_kv_connector()
        except ImportError:
            return None  # Another platform's backend. vLLM raises its own error.
        if not supported:
            return f"attention backend {backend.name} does not support KV connectors"
    return None


def _store_mm_embeds_flag(config: Any) -> None:
    """Copy `--enable-mm-embeds` into cornplug's settings, which every API server process receives."""
    kv, ec = our_settings(config.kv_transfer_config), config.ec_transfer_config
    if kv is not None:
        kv[EMBEDDINGS_BY_VALUE] = True
    if _is_our_ec(ec):
        ec.ec_connector_extra_config[EMBEDDINGS_BY_VALUE] = True


def _complete_settings(config: Any) -> None:
    """Copy all of cornplug's settings into the VllmConfig, because Ray's workers do not inherit the
    environment."""
    # The caller may reuse these objects for another engine in another environment.
    config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
    config.ec_transfer_config = copy.deepcopy(config.ec_transfer_config)
    for extra in all_our_settings(config):
        extra.update(dump_portable(load_settings(extra)))


def _adjust_connectors(config: Any) -> None:
    if _is_our_ec(config.ec_transfer_config) and not config.model_config.is_multimodal_model:
        config.ec_transfer_config = None  # A text-only model has no embeddings to share.
    kv = config.kv_transfer_config
    if not has_ours(kv):
        return
    # If any connector loses a page, the scheduler uses the outer connector's policy. vLLM's default "fail"
    # would abort requests whose pages are corrupt.
    if kv.kv_load_failure_policy != _RECOMPUTE_POLICY:
        compat.logger.warning(
            "cornplug: set kv_load_failure_policy to %r, because 'fail' aborts requests when a page is lost",
            _RECOMPUTE_POLICY,
        )
        kv.kv_load_failure_policy = _RECOMPUTE_POLICY
    for child in child_connectors(kv):
        if child.get("kv_connector") == KV_CONNECTOR:
            child["kv_load_failure_policy"] = _RECOMPUTE_POLICY


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", create_engine_config),
    ("vllm.v1.engine.core", "measure_encoder_output_widths", measure_encoder_output_widths),
)
