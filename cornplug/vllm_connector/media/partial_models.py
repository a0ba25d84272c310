"""Engines that load only a part of the model: no tower (`--cornplug-tower service`), or only the multimodal
encoder.

vLLM does not load the weights of a tower if no media of its modalities are allowed (`--limit-mm-per-prompt`).
It accepts embeddings of these modalities instead (`--enable-mm-embeds`). vLLM's own limit for images is then
0. The user's limit is kept in cornplug's settings, which every API process receives. A worker logs the
weights that it did not load, and how much KV fits into the saved memory.

In an engine that runs only its encoder, vLLM's first model runner (0.32, 0.33) returns an output without the
encoder-cache connector's results. `_make_empty_output` adds these results, so that outcomes of saves are not
lost. vLLM does not encode a media item again if its embedding is in vLLM's own cache. The store may lack this
embedding, because it was evicted or never stored. Such an engine therefore checks the store for each request,
and saves the embedding again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from cornplug.config import IMAGES_PER_PROMPT
from cornplug.engine_common import weights_guard
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import ConfigError, StoreError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.flags import all_our_settings, config_from_settings
from cornplug.vllm_connector.media.mm_identifiers import key_of

ACCEPTS_EMBEDDINGS: Final[Mapping[str, bool]] = {
    "internvl": False,
    "llava": False,
    "llava_next": False,
    "llava_onevision": False,
    "qwen2_vl": True,
    "qwen2_5_vl": True,
    "qwen3_vl": True,
    "qwen3_vl_moe": True,
}
"""Model families that accept `image_embeds` in vLLM 0.32 and 0.33. The value is whether a request must also
contain the image's grid size."""

_FLAG: Final = "--cornplug-tower service"
_NO_MEDIA: Final = {"image": 0, "video": 0, "audio": 0}


def runs_without_tower(config: Any) -> bool:
    """Return whether this VllmConfig configures an engine whose tower runs in the encoder service."""
    said = all_our_settings(config)
    return bool(said) and config_from_settings(said).engine.tower == "service"


def exclude_tower(args: Any) -> bool:
    """If the encoder service runs the tower, set vLLM's flags so that the engine does not load a tower.
    Return whether the service runs the tower.

    Raises ConfigError if no service is configured, or if another flag needs something that the service does
    not support.
    """
    said = all_our_settings(args)
    if not said:
        return False
    config = config_from_settings(said)
    if config.engine.tower != "service":
        return False
    if not config.encoder.engine_urls:
        raise ConfigError(
            _FLAG,
            "an engine without a tower needs the URL of an encoder service",
            "Add --cornplug-encoder http://HOST:8750.",
        )
    ec = args.ec_transfer_config
    if args.mm_encoder_only or (ec is not None and ec.ec_role == "ec_producer"):
        raise ConfigError(_FLAG, "this engine runs only its tower", f"Remove {_FLAG}.")
    if (args.media_io_kwargs or {}).get("image"):
        raise ConfigError(
            "--media-io-kwargs",
            "the encoder service decodes the images of an engine without a tower, with vLLM's defaults",
            f"Remove its part 'image', or {_FLAG}.",
        )
    limit = _max_items((args.limit_mm_per_prompt or {}).get("image"))
    for one in said:
        # On a second call, `args` has the limits that the first call set.
        if limit is not None and IMAGES_PER_PROMPT not in one and args.limit_mm_per_prompt != _NO_MEDIA:
            one[IMAGES_PER_PROMPT] = limit
    args.limit_mm_per_prompt = dict(_NO_MEDIA)
    args.enable_mm_embeds = True
    return True


def check_model(config: Any) -> None:
    """Raise ConfigError if the engine with this VllmConfig cannot run without its tower."""
    family = str(getattr(config.model_config.hf_config, "model_type", None))
    if family not in ACCEPTS_EMBEDDINGS:
        raise ConfigError(
            _FLAG,
            f"vLLM does not accept image embeddings for models of family {family!r}, only for "
            f"{', '.join(sorted(ACCEPTS_EMBEDDINGS))}",
            f"Remove {_FLAG}. The engine then has its own tower, and tries the encoder service first.",
        )
    if not all_our_settings(config):
        raise ConfigError(
            _FLAG,
            "vLLM rejects cornplug's connector with these flags, and the engine has no tower",
            f"Remove {_FLAG}, or the flag that the log names.",
        )


def _max_items(limit: Any) -> int | None:
    """Return the maximum number of items from a modality's limit, which may have any of vLLM's forms. Return
    None if there is no limit."""
    if isinstance(limit, Mapping):
        limit = limit.get("count")
    count = getattr(limit, "count", limit)
    return count if isinstance(count, int) else None


def report_excluded_weights(worker: Any, specs: Mapping[str, Any]) -> None:
    """Log how many bytes of tower weights this rank did not load, and how many tokens of KV fit into that
    memory.

    `specs` are the KV cache specs by layer name.

    Raises ConfigError if vLLM has loaded the tower although the settings exclude it.
    """
    if not runs_without_tower(worker.vllm_config):
        return
    parts = excluded_weight_bytes(worker.model_runner.get_model())
    size = sum(parts.values())
    if not size:
        raise ConfigError(
            "--cornplug-tower service",
            f"vLLM loaded the tower of {worker.vllm_config.model_config.model}, because the model class "
            "does not mark its tower modules",
            "Remove the option.",
        )
    token_bytes = kv_token_bytes(specs)
    compat.logger.info(
        "cornplug: rank %d did not load %s (%d bytes). This is as much memory as KV of %d tokens, at %d "
        "bytes per token",
        worker.rank,
        ", ".join(parts),
        size,
        size // token_bytes if token_bytes else 0,
        token_bytes,
    )


def excluded_weight_bytes(model: Any) -> dict[str, int]:
    """Return the number of bytes of weights that this rank did not load, by module name."""
    from vllm.model_executor.models.utils import StageMissingLayer

    found = {}
    for name, module in model.named_modules():
        # vLLM keeps the omitted module outside torch's list of submodules, with parameters on no device.
        absent = module.__dict__.get("module") if isinstance(module, StageMissingLayer) else None
        if absent is not None:
            found[name] = sum(weight.nbytes for weight in absent.parameters())
    return found


def kv_token_bytes(specs: Mapping[str, Any]) -> int:
    """Return the number of bytes per token in this rank's KV cache, over all layers that have KV for every
    token."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return sum(
        spec.page_size_bytes // spec.block_size for spec in specs.values() if isinstance(spec, AttentionSpec)
    )


def _get_kv_cache_spec(original: Callable[..., Any], worker: Any) -> Any:
    specs = original(worker)
    report_excluded_weights(worker, specs)
    return specs


class LostEmbeddings:
    """Finds embeddings that are in the engine's own cache but not in the store, to save them again. Used by
    the engine's thread."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._runtime = runtime
        self._checked: dict[str, set[str]] = {}
        """Identifiers that were looked up for a request, by request id."""
        self._lost: dict[str, None] = {}

    def check(self, identifier: str, request_id: str) -> None:
        """Check whether the store has an embedding that is in the engine's own cache, once per request."""
        looked = self._checked.setdefault(request_id, set())
        key = key_of(identifier, weights_guard.epoch())
        if key is None or identifier in looked:
            return
        looked.add(identifier)
        try:
            [present] = self._runtime.store.contains([key], deadline_s=self._runtime.deadline_s)
        except StoreError:
            return  # The store would not accept the embedding now either.
        if not present:
            self._lost[identifier] = None

    def finish_request(self, request_id: str) -> None:
        """Remove the record of a finished request's lookups."""
        self._checked.pop(request_id, None)

    def drain(self) -> list[str]:
        """Return the identifiers of embeddings that checks since the last call did not find in the store."""
        lost, self._lost = list(self._lost), {}
        return lost


def _make_empty_output(original: Callable[..., Any], scheduler_output: Any) -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    from vllm.v1.outputs import ECConnectorOutput

    from cornplug.vllm_connector.media.metadata import CornplugECMetadata

    output = original(scheduler_output)
    connector: Any = get_ec_transfer() if has_ec_transfer() else None
    if not isinstance(getattr(connector, "_connector_metadata", None), CornplugECMetadata):
        return output  # The step belongs to another connector.
    acks = connector.build_connector_worker_meta()
    if acks is None:
        return output
    # vLLM returns the same object for all steps without tokens.
    return replace(output, ec_connector_output=ECConnectorOutput(ec_connector_worker_meta=acks))


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "make_empty_encoder_model_runner_output", _make_empty_output),
    ("vllm.v1.worker.gpu_worker", "Worker.get_kv_cache_spec", _get_kv_cache_spec),
)
