"""The keys of a deployment, by the real code of both engines' rooms."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service.media import digest_image
from cornplug.engine_side import engine_config
from cornplug.engine_side.adapters import Adapters
from cornplug.engine_side.model import EngineModel
from cornplug.engine_side.page_roots import page_root
from cornplug.identity import chain, embedding_key, medium_with_options, page_key, placeholder_tokens
from cornplug.kv_page import PageGeometry
from cornplug.vllm_connector.compat import PROVEN
from cornplug.vllm_connector.identifiers import Identifiers, key_of
from cornplug.vllm_connector.page_keys import PageKeys

from .deployments import TEXT_BEFORE, Deployment
from .numbers import PAGE, updated

SECRET: Final = bytes(range(32))


@dataclass(frozen=True)
class Keys:
    embedding: bytes
    pages: tuple[bytes, ...]


def keys(deployment: Deployment, folder: Path, adapter: Path | None, rows: int) -> Keys:
    """As vLLM's room makes them. Raises CheckpointError where nothing would be shared, and
    AssertionError where SGLang's room would make other keys of the same parts."""
    model = _engine_model(deployment, folder)
    tower = model.tower_identity()
    identity, spec = model.kv_identity()
    name = _identifier(deployment, tower.identity)
    lineage = key_of(name)
    assert lineage is not None
    # SGLang's tokenizer process, without the server that it lives in.
    media = medium_with_options(digest_image(deployment.picture), deployment.options)
    assert lineage == embedding_key(SECRET, tower.identity, media, deployment.salt)
    page = PageGeometry(page_tokens=PAGE, heads=2, layers=2, dim=16, dtype=deployment.dtype)
    applied = Adapters().digest(str(adapter)) if adapter is not None else None
    root = page_root(SECRET, (identity, spec), page, adapter=applied, salt=deployment.salt)
    before, after = deployment.tokens[:TEXT_BEFORE], deployment.tokens[TEXT_BEFORE:]
    tokens = [*before, *[0] * rows, *after]
    where = SimpleNamespace(offset=TEXT_BEFORE, length=rows, embeds_cumsum=None)
    features = [SimpleNamespace(identifier=name, mm_position=where)]
    pages = tuple(PageKeys(SECRET, root, PAGE, features).upto(tokens, len(tokens)))
    assert pages == _sglang_pages(root, [*before, *_wide(lineage, rows), *after])
    return Keys(lineage, pages)


def _engine_model(deployment: Deployment, folder: Path) -> EngineModel:
    changed = {}
    if deployment.hf_overrides:
        running = _as_read(updated(deployment.config, deployment.hf_overrides))
        changed = engine_config.changes(running, _as_read(deployment.config))
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype=deployment.dtype,
        max_model_len=deployment.max_model_len,
        engine="vllm",
        proven=PROVEN,
        processor_kwargs=deployment.processor_kwargs,
        config_changes=changed,
    )


def _as_read(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers, and so vLLM, has a config.json."""
    made = CONFIG_MAPPING[config["model_type"]](**json.loads(json.dumps(config)))
    return dict(made.to_dict())


def _identifier(deployment: Deployment, tower: bytes) -> str:
    """What vLLM's API process calls the picture: its own class, without an engine to start it."""
    identifiers = Identifiers.__new__(Identifiers)
    made: dict[str, Any] = {
        "_secret": SECRET,
        "_processor_kwargs": deployment.processor_kwargs,
        "_identity": tower,
        "_ready": threading.Event(),
        "_uuids": OrderedDict(),
        "_lock": threading.Lock(),
    }
    vars(identifiers).update(made)
    identifiers._ready.set()
    options = identifiers.options({**deployment.processor_kwargs, **deployment.options})
    name = identifiers.media_name(deployment.picture, deployment.uuid, options)
    assert name is not None
    return identifiers.identifier(name, deployment.salt)


def _wide(lineage: bytes, rows: int) -> list[int]:
    four = placeholder_tokens(lineage)
    return [four[i % 4] for i in range(rows)]


def _sglang_pages(root: bytes, tokens: list[int]) -> tuple[bytes, ...]:
    """As SGLang's book has them: the chain of its own page hashes."""
    whole = len(tokens) // PAGE * PAGE
    return tuple(page_key(SECRET, root, PAGE, link) for link in chain(b"", tokens[:whole]))
