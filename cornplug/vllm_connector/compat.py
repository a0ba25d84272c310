"""Facts of one vLLM version: the tested range, the validated families, and how functions are wrapped.

vLLM's entry points, connector classes and metrics hooks need no patch. Functions that have no hook in 0.32
are wrapped once, each by a short wrapper around the original:

* `EngineArgs.add_cli_args` and `.from_cli_args`: add the `--kv-connector` flag group.
* `BaseMultiModalProcessor._get_mm_hashes` and `InputProcessor.process_inputs`: set identifiers of media.
* `create_parser` of both item trackers, `BaseRenderer.render_chat` and `.render_chat_async`, and the HTTP
    server's `init_exception_handler`: process images for an engine without a tower.
* `init_scale_out_state`: logs that media of requests that were rendered elsewhere are not shared.
* `Worker.get_kv_cache_spec`: logs the weights that an engine without a tower has not loaded.
* `make_empty_encoder_model_runner_output`: reports the saves of an engine without a language model.
* `ImageEmbeddingMediaIO.load_base64`: accepts handles instead of embeddings.
* `Worker.load_model` and `.reload_weights`: compare the loaded weights with the files.
* `MultiConnector.__init__` and `.update_state_after_alloc`: detect that other connectors load KV.
* `EngineCoreProc.run_busy_loop`: wakes a sleeping engine.
* `SpinCondition.wait`: does not let workers spin after steps without tokens.
* `OMPProcessManager.__init__`: lets an engine on a CPU use as many cores as without cornplug.
* `EngineCore._reset_caches`: distinguishes a pause from a reset that a user requested.
* `collective_rpc` of `EngineCore` and `AsyncLLM`, `EngineCore.sleep`: detect that weights were replaced.
* `EngineCore.reset_prefix_cache`: detects that no block holds KV of replaced weights.
* `Worker.sleep`: ends copies of KV before its memory is released.
* `Scheduler.__init__`: counts the engine cores that share this engine's state.
* `Scheduler.add_request`: allows the id of a request that was aborted while it loads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from cornplug.checkpoints.validated_families import validated
from cornplug.encoder_service.wire.decodings import decoding_of
from cornplug.engine_common.version_range import VersionRange

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.cornplug")

KV_CONNECTOR: Final = "CornplugConnector"
EC_CONNECTOR: Final = "CornplugECConnector"
"""Names of both connectors in vLLM's factories. Users write them into configurations."""

SUPPORTED_VERSIONS: Final = VersionRange("vLLM", "vllm", (0, 32), (0, 34))

EPOCHS: Final[dict[str, int]] = {}
"""`model_type` -> numeric epoch. Increase it when a release of vLLM changes the results of a model (a bug fix
in the tower, another rope), so that engines before and after the change do not share."""

_ADAPTS_NEIGHBOURS: Final = VersionRange("vLLM", "vllm", (0, 32), (0, 33))
"""Releases whose CPU LoRA kernels may apply another request's adapter to requests without one
(vllm#48421)."""
_MARK = "_cornplug_original"


def validated_families(dtype: str, kind: str = "image") -> frozenset[str]:
    """Return the families whose media of this kind the installed vLLM shares with this dtype.

    `tests/integration/test_families.py` and `test_family_videos.py` have compared this release's embeddings
    with those of the encoder service. vLLM may lay out, scale or split embeddings of other families
    differently.
    """
    return validated("vllm", SUPPORTED_VERSIONS.installed(), dtype, kind)


def adapts_neighbours(config: VllmConfig) -> bool:
    """Return whether vLLM may apply another request's LoRA adapter of the same batch to a request without
    one."""
    from vllm.platforms import current_platform

    affected = str(SUPPORTED_VERSIONS.installed()) in _ADAPTS_NEIGHBOURS and current_platform.is_cpu()
    return affected and getattr(config, "lora_config", None) is not None


def decoding() -> str:
    """Return the rule by which the installed vLLM decodes images."""
    version = str(SUPPORTED_VERSIONS.installed())
    # If the rule is unknown, this name makes the encoder service reject the request.
    return decoding_of("vllm", version) or f"vllm-{version}"


def wrap(module: str, qualified: str, wrapper: Callable[..., Any]) -> None:
    """Replace `module.qualified` by `wrapper(original, *args, **kwargs)`, once.

    Keeps staticmethod and classmethod. Raises AttributeError or ImportError if this vLLM does not have the
    function. `plugin.register` logs that as one line.
    """
    owner, name, raw = _target(module, qualified)
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if hasattr(function, _MARK):
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(wrapped, _MARK, function)
    if isinstance(raw, (staticmethod, classmethod)):
        setattr(owner, name, type(raw)(wrapped))
    else:
        setattr(owner, name, wrapped)


def wrap_all(seams: Iterable[tuple[str, str, Callable[..., Any]]]) -> None:
    """Wrap all of these functions, or none if this vLLM does not have one of them. Raises as `wrap`."""
    seams = list(seams)
    for module, qualified, _ in seams:
        _target(module, qualified)
    for seam in seams:
        wrap(*seam)


def _target(module: str, qualified: str) -> tuple[Any, str, Any]:
    """Return the owner of `module.qualified`, the name there, and the attribute's value."""
    owner: Any = importlib.import_module(module)
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)
