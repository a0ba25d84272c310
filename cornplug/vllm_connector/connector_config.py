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

from cornplug.config import EMBEDDINGS_BY_VALUE, portable
from cornplug.engine_common import engine_state
from cornplug.engine_common.shared_flags import settings
from cornplug.sharing_verdict import first_line
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR, KV_CONNECTOR
from cornplug.vllm_connector.media import partial_models
from cornplug.vllm_connector.several_connectors import (
    connectors,
    has_ours,
    is_ours,
    our_settings,
    settings_in,
    with_offloading,
)

_RECOMPUTE: Final = "recompute"
_PRODUCER: Final = "ec_producer"

# vLLM's configuration classes raise these exceptions for unsupported combinations of settings. pydantic's
# ValidationError is a ValueError.
_REFUSALS: Final = (ValueError, AssertionError, NotImplementedError, RuntimeError)

_left_out: Final[list[str]] = []
"""Reason why the most recently created VllmConfig does not include cornplug's KV connector, as the only
item. Empty if the VllmConfig includes the connector."""


def why_not() -> str:
    """Return the reason why the most recently created VllmConfig of this process does not share KV. Returns
    "" if it shares KV, or if cornplug was not configured."""
    return _left_out[0] if _left_out else ""


def create(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Create the VllmConfig for these engine arguments, with each of cornplug's connectors that vLLM accepts.

    If vLLM rejects the arguments even without cornplug, vLLM's own error is raised.
    """
    _left_out.clear()
    if not _asked_for(args):
        return original(args, *rest, **kwargs)
    engine_state.begin()
    _offload_beside(args)
    # vLLM sets this flag itself for every engine with a connector that loads embeddings. Read the user's
    # value first.
    by_value = bool(getattr(args, "enable_mm_embeds", False))
    without_tower = partial_models.leave_out_tower(args)
    # vLLM writes resolved values into the arguments, so a second attempt needs a copy of the original
    # arguments.
    given = copy.deepcopy(args)

    def without(*names: str) -> Any:
        fewer = copy.deepcopy(given)
        for name in names:
            setattr(fewer, name, None)
        return original(fewer, *rest, **kwargs)

    alone = _encoder_alone(given, lambda fewer: original(fewer, *rest, **kwargs))
    try:
        config = alone or original(args, *rest, **kwargs)
    except _REFUSALS as refused:
        config = _fewer(without, given, refused)
    else:
        reason = kv_impossible(config)
        if reason and is_ours(config.kv_transfer_config):
            _no_kv("cornplug: KV of this engine is not shared: %s", reason)
            config = without("kv_transfer_config")
    if by_value:
        _note_by_value(config)
    _settle(config)
    _complete_settings(config)
    if without_tower:
        partial_models.check_model(config)
    return config


def _encoder_alone(given: Any, make: Callable[[Any], Any]) -> Any | None:
    """Create the VllmConfig for an engine that runs only its multimodal encoder. Returns None for any other
    engine, and if vLLM rejects the configuration.

    The connector's role determines which model runner vLLM uses. With a role that may load embeddings, the
    runner calls the language model, which `--mm-encoder-only` does not load.
    """
    ec = given.ec_transfer_config
    asked = given.mm_encoder_only or (_is_ec(ec) and ec.ec_role == _PRODUCER)
    if not asked:
        return None
    fewer = copy.deepcopy(given)
    if is_ours(fewer.kv_transfer_config):
        fewer.kv_transfer_config = None
    if _is_ec(ec):
        fewer.ec_transfer_config.ec_role = _PRODUCER
        if fewer.mm_processor_device == "auto" and fewer.mm_tensor_ipc == "torch_shm":
            # vLLM would preprocess images on a producer's GPU. The producer's pixel values would then differ
            # from the consumers' pixel values.
            fewer.mm_processor_device = "cpu"
    try:
        config = make(fewer)
    except _REFUSALS:
        return None
    if not config.is_mm_encoder_only:
        return None
    _left_out[:] = ["this engine runs the encoder only"]
    compat.logger.info("cornplug: %s, so there is no KV to share", _left_out[0])
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


def _asked_for(args: Any) -> bool:
    return has_ours(getattr(args, "kv_transfer_config", None)) or _is_ec(
        getattr(args, "ec_transfer_config", None)
    )


def _is_ec(ec: Any) -> bool:
    return ec is not None and ec.ec_connector == EC_CONNECTOR


def _offload_beside(args: Any) -> None:
    """Replace `--kv-offloading-size` by a connector next to cornplug. Otherwise vLLM would silently replace
    cornplug by its offloading connector."""
    if args.kv_offloading_size is None or not has_ours(args.kv_transfer_config):
        return
    args.kv_transfer_config = with_offloading(
        args.kv_transfer_config, args.kv_offloading_size, args.kv_offloading_backend
    )
    args.kv_offloading_size = None


def _fewer(without: Callable[..., Any], given: Any, refused: Exception) -> Any:
    """Create the VllmConfig again without the connectors that vLLM rejects. Leave out as few connectors as
    possible."""
    if is_ours(given.kv_transfer_config):
        try:
            config = without("kv_transfer_config")
        except _REFUSALS:
            pass
        else:
            _no_kv(
                "cornplug: KV of this engine is not shared, because vLLM rejects a KV connector with this "
                "configuration: %s",
                refused,
            )
            return config
    if not _is_ec(given.ec_transfer_config):
        raise refused
    names = ["ec_transfer_config"]
    if is_ours(given.kv_transfer_config):
        names.append("kv_transfer_config")
    # If vLLM also rejects the arguments without cornplug, this call raises vLLM's own error.
    config = without(*names)
    _no_kv(
        "cornplug: this engine shares nothing, because vLLM rejects cornplug's connectors with this "
        "configuration: %s",
        refused,
    )
    return config


def _no_kv(line: str, why: object) -> None:
    compat.logger.warning(line, why)
    _left_out[:] = [first_line(why) if isinstance(why, Exception) else str(why)]


def kv_impossible(config: Any) -> str | None:
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


def _note_by_value(config: Any) -> None:
    """Copy `--enable-mm-embeds` into cornplug's settings, which every API server process receives."""
    kv, ec = our_settings(config.kv_transfer_config), config.ec_transfer_config
    if kv is not None:
        kv[EMBEDDINGS_BY_VALUE] = True
    if _is_ec(ec):
        ec.ec_connector_extra_config[EMBEDDINGS_BY_VALUE] = True


def _complete_settings(config: Any) -> None:
    """Copy all of cornplug's settings into the VllmConfig, because Ray's workers do not inherit the
    environment."""
    # The caller may reuse these objects for another engine in another environment.
    config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
    config.ec_transfer_config = copy.deepcopy(config.ec_transfer_config)
    for extra in settings_in(config):
        extra.update(portable(settings(extra)))


def _settle(config: Any) -> None:
    if _is_ec(config.ec_transfer_config) and not config.model_config.is_multimodal_model:
        config.ec_transfer_config = None  # A text-only model has no embeddings to share.
    kv = config.kv_transfer_config
    if not has_ours(kv):
        return
    # If any connector loses a page, the scheduler uses the outer connector's policy. vLLM's default "fail"
    # would abort requests whose pages are corrupt.
    if kv.kv_load_failure_policy != _RECOMPUTE:
        compat.logger.warning(
            "cornplug: set kv_load_failure_policy to %r, because 'fail' aborts requests when a page is lost",
            _RECOMPUTE,
        )
        kv.kv_load_failure_policy = _RECOMPUTE
    for child in connectors(kv):
        if child.get("kv_connector") == KV_CONNECTOR:
            child["kv_load_failure_policy"] = _RECOMPUTE


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", create),
    ("vllm.v1.engine.core", "measure_encoder_output_widths", measure_encoder_output_widths),
)
