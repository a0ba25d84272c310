"""Keys by SGLang's room, without an engine to start it."""

from __future__ import annotations

import json
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs

from cornplug.encoder_service.formats.image import digest_image
from cornplug.engine_common.model_identity import EngineModel
from cornplug.errors import CheckpointError
from cornplug.identity import media_item_lineage, page_key, placeholder_tokens
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv_pages import namespace_roots
from cornplug.sglang_hooks.kv_pages.namespace_roots import NamespaceRoots
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.media import mm_identifiers
from cornplug.sglang_hooks.model.model_config import describe

from .deployments import TEXT_BEFORE, Deployment
from .numbers import PAGE

FAMILIES: Final = ("qwen2_vl", "qwen3_vl")


def engine_model(deployment: Deployment, folder: Path) -> EngineModel:
    """What the room makes of SGLang's settings."""
    kwargs = deployment.processor_kwargs
    settings = ServerArgs(
        model_path=str(folder),
        dtype=deployment.dtype,
        json_model_override_args=json.dumps(deployment.hf_overrides),
        mm_process_config={"image": kwargs} if kwargs else None,
    )
    model = SimpleNamespace(
        model_path=str(folder),
        revision=None,
        dtype=getattr(torch, deployment.dtype),
        context_len=deployment.max_model_len,
        pointer_head=None,
        hf_config=SimpleNamespace(),
    )
    return describe(settings, model)


def lineage(deployment: Deployment, tower: bytes, secret: bytes) -> bytes:
    """The key of the image's embedding, as the tokenizer process names it."""
    options: dict[str, Any] = {}
    if deployment.options:
        options = {"sglang": {"request": deployment.options, "picture": {}}}
    runtime, activation.runtime = activation.runtime, lambda: SimpleNamespace(secret=secret)  # type: ignore[assignment]
    try:
        found = mm_identifiers._key(tower, digest_image(deployment.image), options, deployment.salt)
    finally:
        activation.runtime = runtime
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
    """The keys of the prompt's whole pages, out of the index that the scheduler's process keeps."""
    space = CacheNamespace(_loaded(adapter) if adapter is not None else None, deployment.salt)
    four = placeholder_tokens(media_item_lineage(medium, rows))
    wide = [four[i % 4] for i in range(rows)]
    tokens = [*deployment.tokens[:TEXT_BEFORE], *wide, *deployment.tokens[TEXT_BEFORE:]]
    whole = tokens[: len(tokens) // PAGE * PAGE]
    key = RadixKey(array("q", whole), extra_key=space.extra_key, cache_salt=space.cache_salt)
    hashes = get_storage_hash_str(key, None, page_size=PAGE)
    index = PageHashIndex(PAGE, PAGE)
    index.record(None, hashes, whole, space)
    roots = NamespaceRoots(secret, page, lambda: identity)
    assert roots.wait(60)
    root = _root(roots, space)
    links = []
    for found in index.find(hashes):
        assert found is not None
        (part,) = index.overlaps(found)
        links.append(part.links[-1])
    return tuple(page_key(secret, root, PAGE, link) for link in links)


def _root(roots: NamespaceRoots, space: CacheNamespace) -> bytes:
    """The root, once another thread has read the adapter's files: a request before that shares nothing."""
    while True:
        try:
            return roots.root(space)
        except CheckpointError as e:
            if e.reason != "identifying":
                raise
            time.sleep(0.01)


def _loaded(adapter: Path) -> str:
    """The id under which SGLang has loaded it, with all of it applied."""
    name = adapter.parent.name.rjust(32, "0")
    weights = {"layers.0.q_proj.lora_A.weight": None}
    loaded = SimpleNamespace(layers=[SimpleNamespace(weights=weights)], embedding_layers={})
    manager = SimpleNamespace(loras={name: loaded}, target_modules={"q_proj", "v_proj"})
    namespace_roots._managers[name], namespace_roots._paths[name] = manager, str(adapter)
    return name
