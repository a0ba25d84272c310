"""Compatibility with vLLM: supported versions, validated model families, and wrappers around vLLM's
functions.

vLLM's entry points, connector classes and metrics hooks are used as they are. The following functions have no
hook in vLLM 0.32, so each of them is replaced by a short wrapper around the original:

* `EngineArgs.add_cli_args` and `.from_cli_args`: add the `--kv-connector` flag group.
* `BaseMultiModalProcessor._get_mm_hashes` and `InputProcessor.process_inputs`: set identifiers of media.
* `create_parser` of both item trackers, `BaseRenderer.render_chat` and `.render_chat_async`, and the HTTP
  server's `init_exception_handler`: process images for an engine that has not loaded its vision tower.
* `init_scale_out_state`: logs that media in requests rendered by another process are not shared.
* `Worker.get_kv_cache_spec`: logs the weights that an engine without a tower has not loaded.
* `make_empty_encoder_model_runner_output`: reports the embeddings that an encoder-only engine saves.
* `ImageEmbeddingMediaIO.load_base64`: accepts handles instead of embeddings.
* `Worker.load_model` and `.reload_weights`: compare the loaded weights with the files.
* `MultiConnector.__init__` and `.update_state_after_alloc`: detect that other connectors load KV.
* `EngineCoreProc.run_busy_loop`: lets a timer wake an idle engine core.
* `SpinCondition.wait`: stops workers from busy-waiting after steps without tokens.
* `OMPProcessManager.__init__`: lets a CPU engine use as many cores as it would without cornplug.
* `EngineCore._reset_caches`: distinguishes a pause from a reset that a user requested.
* `collective_rpc` of `EngineCore` and `AsyncLLM`, `EngineCore.sleep`: detect that weights were replaced.
* `EngineCore.reset_prefix_cache`: detects that no block still holds KV computed with replaced weights.
* `Worker.sleep`: ends copies of KV before its memory is released.
* `Scheduler.__init__`: counts the engine cores that share this engine's state, and passes the size of the
  encoder cache to the connector.
* `GPUModelRunner._execute_mm_encoder`, `ModelState.execute_mm_encoder`: encode items whose embeddings a
  worker could not load.
* `Scheduler.add_request`: accepts a request with the id of a request that was aborted while it was loading.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from cornplug.checkpoints.tested_releases import VersionRange, compared_families
from cornplug.encoder_service.formats.messages import decoding_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.cornplug")

KV_CONNECTOR: Final = "CornplugConnector"
EC_CONNECTOR: Final = "CornplugECConnector"
"""`KV_CONNECTOR` and `EC_CONNECTOR` are the names of cornplug's connectors in vLLM's factories. Users write
these names into configurations."""

SUPPORTED_VERSIONS: Final = VersionRange("vLLM", "vllm", (0, 32), (0, 34))

EPOCHS: Final[dict[str, int]] = {}
"""Epoch number by `model_type`. Increase a model's epoch when a vLLM release changes the model's results, for
example by a bug fix in the tower or by different rotary embeddings. Engines before and after the change then
do not share."""

_FOREIGN_ADAPTER_RELEASES: Final = VersionRange("vLLM", "vllm", (0, 32), (0, 33))
"""Releases with vllm#48421: their CPU LoRA kernels may apply another request's adapter to requests without
an adapter."""
_ORIGINAL_ATTRIBUTE = "_cornplug_original"


def validated_families(dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the model families for which cornplug shares embeddings of this kind of media with the installed
    vLLM in this dtype.

    For these families, `tests/integration/test_families.py` and `test_family_videos.py` have compared this
    release's embeddings with the encoder service's embeddings. vLLM may lay out, scale or split the
    embeddings of other families differently.
    """
    return compared_families("vllm", SUPPORTED_VERSIONS.installed_version(), dtype, kind)


def may_apply_foreign_adapter(config: VllmConfig) -> bool:
    """Return whether vLLM may apply another request's LoRA adapter of the same batch to a request without
    an adapter."""
    from vllm.platforms import current_platform

    affected = (
        str(SUPPORTED_VERSIONS.installed_version()) in _FOREIGN_ADAPTER_RELEASES and current_platform.is_cpu()
    )
    return affected and getattr(config, "lora_config", None) is not None


def decoding_rule() -> str:
    """Return the name of the rule by which the installed vLLM decodes images."""
    version = str(SUPPORTED_VERSIONS.installed_version())
    # For an unknown version, return a name that makes the encoder service reject the request.
    return decoding_of("vllm", version) or f"vllm-{version}"


def wrap(module: str, qualified: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function `qualified` in `module` with a function that calls `wrapper(original, *args,
    **kwargs)`. Does nothing if the function is already wrapped.

    A wrapped staticmethod or classmethod keeps its type. Raises AttributeError or ImportError if this vLLM
    does not have the function. `plugin.register` logs this error on one line.
    """
    owner, name, raw = _resolve_target(module, qualified)
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if hasattr(function, _ORIGINAL_ATTRIBUTE):
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(wrapped, _ORIGINAL_ATTRIBUTE, function)
    if isinstance(raw, (staticmethod, classmethod)):
        setattr(owner, name, type(raw)(wrapped))
    else:
        setattr(owner, name, wrapped)


def wrap_all(wrappers: Iterable[tuple[str, str, Callable[..., Any]]]) -> None:
    """Wrap vLLM functions, given as (module, qualified name, wrapper). If this vLLM lacks one of the
    functions, no function is wrapped. Raises the same errors as `wrap`."""
    wrappers = list(wrappers)
    for module, qualified, _ in wrappers:
        _resolve_target(module, qualified)
    for seam in wrappers:
        wrap(*seam)


def _resolve_target(module: str, qualified: str) -> tuple[Any, str, Any]:
    """Return (object that has the attribute, name of the attribute, value of the attribute) for
    `module.qualified`."""
    owner: Any = importlib.import_module(module)
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)
