"""Keys by vLLM's room, without an engine to start it."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.multimodal.inputs import PlaceholderRange

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_config
from cornplug.engine_common.lora_digests import LoraDigests
from cornplug.engine_common.model_identity import EngineModel, TowerIdentity, page_root
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.kv_page import PageGeometry
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import validated_families
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.media.mm_identifiers import MmIdentifiers, key_of

from .deployments import TEXT_BEFORE, Deployment
from .numbers import PAGE, updated

FAMILIES: Final = ("llava", "qwen2_vl", "qwen3_vl")


def engine_model(deployment: Deployment, folder: Path) -> EngineModel:
    """What the room makes of a VllmConfig, which takes vLLM seconds to make."""
    changed = {}
    if deployment.hf_overrides:
        running = _as_read(updated(deployment.config, deployment.hf_overrides))
        changed = engine_config.config_changes(running, _as_read(deployment.config))
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype=deployment.dtype,
        max_model_len=deployment.max_model_len,
        engine="vllm",
        validated_families=validated_families("float32"),
        processor_kwargs=deployment.processor_kwargs,
        config_changes=changed,
    )


def _as_read(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers, and so vLLM, has a config.json."""
    made = CONFIG_MAPPING[config["model_type"]](**json.loads(json.dumps(config)))
    return dict(made.to_dict())


def lineage(deployment: Deployment, tower: bytes, secret: bytes) -> bytes:
    """The key of the image's embedding, out of the name that vLLM's API process gives it."""
    identifiers = MmIdentifiers.__new__(MmIdentifiers)
    made: dict[str, Any] = {
        "_secret": secret,
        "_processor_kwargs": deployment.processor_kwargs,
        "_tower": CurrentIdentity(lambda: TowerIdentity(tower, None), "embeddings", compat.logger.warning),
        "_uuids": OrderedDict(),
        "_lock": threading.Lock(),
    }
    vars(identifiers).update(made)
    assert made["_tower"].current()[1].wait(60)
    options = identifiers.changed_options({**deployment.processor_kwargs, **deployment.options})
    name = identifiers.media_name(deployment.image, deployment.uuid, options)
    assert name is not None
    found = key_of(identifiers.create_identifier(name, deployment.salt))
    assert found is not None
    return found


def pages(
    deployment: Deployment,
    identity: tuple[bytes, dict[str, Any]],
    page: PageGeometry,
    adapter: Path | None,
    medium: bytes,
    rows: int,
    secret: bytes,
) -> tuple[bytes, ...]:
    """The keys of the prompt's whole pages."""
    applied = LoraDigests().digest(str(adapter)) if adapter is not None else None
    root = page_root(secret, identity, page, adapter=applied, salt=deployment.salt)
    tokens = [*deployment.tokens[:TEXT_BEFORE], *[0] * rows, *deployment.tokens[TEXT_BEFORE:]]
    where = PlaceholderRange(TEXT_BEFORE, rows)
    features = [SimpleNamespace(identifier=f"cp1-{medium.hex()}", mm_position=where)]
    return tuple(PageKeys(secret, root, PAGE, features).keys_until(tokens, len(tokens)))
