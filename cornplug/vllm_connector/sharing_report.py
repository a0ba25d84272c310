"""Report for `cornplug doctor --model`: whether vLLM can share a checkpoint's KV and embeddings. The report
does not start an engine.

The report calls the same checks as an engine at start. vLLM groups layers by their KV cache specs, so the
report builds the model on PyTorch's meta device, without weights. It skips the last check, which writes a
pattern into the KV cache and reads it back, because there is no cache.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cornplug import config as settings
from cornplug.errors import ConfigError, LayoutError
from cornplug.sharing_verdict import (
    NO_TOWER,
    SharingVerdict,
    rejected_verdicts,
    summarize_error,
    verdict_of_checks,
)
from cornplug.vllm_connector.connector_config import kv_refusal
from cornplug.vllm_connector.flags import NAME, has_ours, our_settings
from cornplug.vllm_connector.kv.cache_geometry import checkpoint_scales, rank_slice
from cornplug.vllm_connector.kv.page_kinds import DRAFT_PREFIX, page_kinds
from cornplug.vllm_connector.media import mm_identifiers
from cornplug.vllm_connector.media.encoder_requests import MEDIA_IN_WORKERS_ONLY, is_media_in_workers_only
from cornplug.vllm_connector.model.model_config import draft_config_with_kv, kv_identity, tower_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_ONE_GROUP_FLAG: Final = "--disable-hybrid-kv-cache-manager"
# Exceptions that the constructors of some models raise on the meta device.
_BUILD_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


def describe(model: str, flags: Sequence[str] = ()) -> list[SharingVerdict]:
    """Return whether KV and embeddings are shared with `vllm serve MODEL FLAGS --kv-connector cornplug`.
    Reads the weights once.

    Call this function in a separate process. It initialises vLLM's process groups for one rank, and ends the
    process if vLLM's parser rejects a flag.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        args = _parse_arguments(model, flags)
        rendered = mm_identifiers.accepts_processed_inputs(args)
        config = EngineArgs.from_cli_args(args).create_engine_config()
    except (ValueError, OSError, NotImplementedError, ConfigError) as e:
        return rejected_verdicts("vLLM", e)
    return [_kv_verdict(config), _embeddings_verdict(config, accepts_processed_inputs=rendered)]


def _parse_arguments(model: str, flags: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `vllm serve MODEL FLAGS`, with cornplug added as a KV connector if the flags do
    not configure one."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", model, *flags])
    args.model = args.model_tag
    if args.kv_connector is None and not has_ours(args.kv_transfer_config):
        args.kv_connector = NAME
    return args


def _embeddings_verdict(config: VllmConfig, *, accepts_processed_inputs: bool) -> SharingVerdict:
    if not config.model_config.is_multimodal_model:
        return SharingVerdict(what="embeddings", shared=False, why=NO_TOWER)
    found = verdict_of_checks("embeddings", lambda: tower_identity(config))
    limits = (
        [f"The engine does not use the encoder service: {MEDIA_IN_WORKERS_ONLY}."]
        if is_media_in_workers_only(config)
        else []
    )
    limits += [f"But {mm_identifiers.PROCESSED_NOT_SHARED}."] if accepts_processed_inputs else []
    return msgspec.structs.replace(found, remedy=" ".join(limits)) if found.shared else found


def _kv_verdict(config: VllmConfig) -> SharingVerdict:
    ours = our_settings(config.kv_transfer_config)
    if ours is None:
        return SharingVerdict(
            what="KV", shared=False, why=kv_refusal() or "another KV connector is configured"
        )
    engine = settings.load_portable(ours).engine
    if not engine.share_kv:
        return SharingVerdict(what="KV", shared=False, why="engine.share_kv is false")
    config = _single_rank_config(config)
    try:
        specs = _layer_specs(config)
        _group_layers(config, specs)
    except _BUILD_ERRORS as e:
        why = (
            "cannot be determined without starting the engine: vLLM could not build the model without "
            f"weights: {summarize_error(e)}"
        )
        return SharingVerdict(what="KV", shared=None, why=why)
    found = verdict_of_checks("KV", lambda: _check_layers(config, specs, engine.page_tokens))
    if found.shared:
        return verdict_of_checks("KV", lambda: kv_identity(config))
    if _can_share_one_group(config, specs, engine.page_tokens):
        remedy = (
            f"{_ONE_GROUP_FLAG} allows sharing, but the engine's cache then keeps all tokens of "
            "windowed layers."
        )
        return SharingVerdict(what="KV", shared=False, why=found.why, remedy=remedy)
    return found


def _single_rank_config(config: VllmConfig) -> VllmConfig:
    """Return a copy of the config with tensor and data parallelism of 1, so that one rank has all heads. The
    report runs in a single process."""
    alone = copy.copy(config)
    alone.parallel_config = _without_parallelism(config.parallel_config)
    if config.speculative_config is not None:
        alone.speculative_config = copy.copy(config.speculative_config)
        drafts = alone.speculative_config.draft_parallel_config
        alone.speculative_config.draft_parallel_config = _without_parallelism(drafts)
    return alone


def _without_parallelism(parallel: Any) -> Any:
    found = copy.copy(parallel)
    found.tensor_parallel_size = found.data_parallel_size = 1
    return found


def _check_layers(config: VllmConfig, specs: Mapping[str, KVCacheSpec], page_tokens: int) -> None:
    """Raise LayoutError, with the reason, if the engine cannot share the KV of these layers."""
    groups = _group_layers(config, specs)
    kinds = page_kinds(config, groups, page_tokens)
    for kind in kinds:
        rank_slice(config, groups, kind.geometry)
    if any(kind.geometry.quantised for kind in kinds):
        checkpoint_scales(config)


def _can_share_one_group(config: VllmConfig, specs: Mapping[str, KVCacheSpec], page_tokens: int) -> bool:
    """Return whether KV could be shared without vLLM's hybrid KV cache manager, which puts all layers into
    one cache group if it is disabled."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    plain = copy.copy(config)
    plain.scheduler_config = copy.copy(config.scheduler_config)
    plain.scheduler_config.disable_hybrid_kv_cache_manager = True
    try:
        _check_layers(plain, specs, page_tokens)
    except (LayoutError, ValueError):  # vLLM cannot put some kinds of layers into one group.
        return False
    return True


def _layer_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Build the model without weights and return its layers' KV cache specs, by layer name, in order of
    construction."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        # On a second call, vLLM keeps the process groups that the first call created.
        init_distributed_environment(1, 0, f"file://{Path(folder, 'group')}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            initialize_model(vllm_config=config)
            _build_draft(config)
        # In models with recurrent states, the size of one layer's state determines the block size. It is
        # known only after the layers are constructed.
        current_platform.update_block_size_for_backend(config)
        found: dict[str, KVCacheSpec] = get_kv_cache_spec(config)
    return found


def _build_draft(config: VllmConfig) -> None:
    """Build the draft model, if there is one, so that its layers are added to the config. As in vLLM, the
    draft is built after its target."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative = draft_config_with_kv(config)
    if speculative is None:
        return
    draft = speculative.draft_model_config
    if not speculative.uses_draft_model():
        # The draft model's class also reads the target model's config.
        initialize_model(vllm_config=config, model_config=draft)
        return
    alone = copy.copy(config)
    alone.model_config, alone.quant_config = draft, None
    with set_current_vllm_config(alone):
        initialize_model(vllm_config=alone, prefix=DRAFT_PREFIX)


def _group_layers(config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """Return the KV cache groups into which vLLM divides these layers."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    except ImportError:  # vLLM 0.32 does not have the builder.
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    else:
        get_kv_cache_groups = get_kv_cache_config_builder(config).get_kv_cache_groups

    if config.cache_config.kv_cache_layout is None:
        # In an engine, the workers report the layout to the engine core. The layout affects how groups share
        # memory, but not into which groups vLLM divides the layers.
        config.cache_config.kv_cache_layout = "LBNHC"
    # vLLM modifies the specs while it groups them.
    groups = get_kv_cache_groups(config, copy.deepcopy(dict(specs)))
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
