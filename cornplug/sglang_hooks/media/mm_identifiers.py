"""Assigns embedding keys to images in the tokenizer process. A key is a digest of content, model and salt.

SGLang identifies a media item by 64 bits of a hash of its processed features, by a client's `mm_hashes`, or
(LLaVA) by its URL. This identifier determines the item's placeholder tokens in SGLang's radix cache and KV
pages, and its key in SGLang's embedding cache. This module calls

    placeholder_tokens.assign_key(item, embedding key)

for every image with a digest. The key is the same as in vLLM, so that both engines use the same placeholder
tokens. It replaces any identity that SGLang or a client has set. Media whose tower only SGLang runs get a key
for that tower. Media without a digest keep SGLang's identifier and get no identity. Therefore they cannot be
confused with media that have a key.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.errors import CheckpointError
from cornplug.identity import embedding_key, identity_with_overrides, media_digest_with_options
from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.compat import Hook, salt_of_request
from cornplug.sglang_hooks.media import media_digests, placeholder_tokens, preprocessing
from cornplug.sglang_hooks.media.embedding_prefetch import EmbeddingPrefetcher
from cornplug.sglang_hooks.media.media_digests import OwnTower, own_tower
from cornplug.sglang_hooks.model.model_config import engine_model, runs_generic_backend

_DEFAULT_OPTIONS: Final[Mapping[str, Any]] = {"detail": "auto"}
# Request fields that some of SGLang's processors (InternVL, OCR) read in addition to `mm_processor_kwargs`.
_REQUEST_FIELDS: Final = (
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "images_config",
)

_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


@dataclass(frozen=True, slots=True)
class Towers:
    """Towers of one model that compute shared embeddings."""

    images: TowerIdentity | None = None
    """Image tower that was tested against the encoder service, or None."""
    own: OwnTower | None = None
    """Tower for media that only SGLang servers share, or None."""

    @property
    def own_modalities(self) -> frozenset[str]:
        """Modalities whose keys are computed from the identity of `own`."""
        named = self.own.modalities if self.own is not None else frozenset()
        return named if self.images is None else named - {"image"}

    def tower_for(self, item: Any) -> TowerIdentity | None:
        """Return the tower that computes an item's embedding, or None if the embedding is not shared."""
        if self.own is not None and item.modality.name.lower() in self.own_modalities:
            return self.own.tower
        return self.images if item.is_image() else None


class MediaIdentifiers:
    """Identifies the towers of this tokenizer process's model."""

    def __init__(self, processor: Any) -> None:
        """Begin to identify the towers. `processor` is SGLang's BaseMultimodalProcessor."""
        # The first read of a large checkpoint takes seconds. Startup continues in the meantime.
        self._towers = CurrentIdentity(lambda: _identify(processor), "embeddings", compat.logger.warning)

    async def towers(self) -> tuple[int, Towers]:
        """Return (epoch of the weights, towers with these weights).

        The result has no towers while the checkpoint is being read, or if the towers cannot be identified.
        """
        epoch, towers = self._towers.current()
        if towers.initial_wait_s() > 0:
            # Wait in one of the threads in which SGLang decodes media.
            await asyncio.to_thread(towers.wait_initially)
        return epoch, towers.value or Towers()


def _identify(processor: Any) -> Towers:
    """Identify the towers. Raises CheckpointError if no embedding of this model can be shared."""
    own, failed = None, None
    try:
        own = _own_tower()
    except CheckpointError as e:
        failed = e
    try:
        return Towers(_tower_identity(processor), own)
    except CheckpointError as e:
        if own is None:
            raise failed or e from e
        compat.logger.info(
            "cornplug: embeddings of %s are shared only with SGLang servers with this checkpoint: %s",
            ", ".join(sorted(own.modalities)),
            e,
        )
        return Towers(own=own)


def _own_tower() -> OwnTower | None:
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.runtime_context import get_server_args

    model, settings = engine_model(), get_server_args()
    generic = runs_generic_backend(model_config_of(settings))
    return own_tower(model, resolved_view(settings), generic=generic)


def _tower_identity(processor: Any) -> TowerIdentity:
    model = engine_model()
    tower = model.tower_identity()
    differs = preprocessing.preprocessing_difference(processor, model)
    if differs is None:
        return tower
    compat.logger.info(
        "cornplug: SGLang preprocesses images of this model differently, so their embeddings and KV are "
        "shared only with SGLang servers"
    )
    return replace(tower, identity=identity_with_overrides(tower.identity, {"sglang_preprocessing": differs}))


def assign_keys(mm_inputs: Any, towers: Towers, obj: Any, *, epoch: int = 0) -> list[Any]:
    """Assign embedding keys to a request's media, and clear the keys of all other items. Return the items
    with a key.

    Args:
        mm_inputs: SGLang's MultimodalProcessorOutput.
        towers: towers for which the keys are computed.
        obj: SGLang's GenerateReqInput or EmbeddingReqInput.
        epoch: epoch of the towers' weights.
    """
    items = mm_inputs.mm_items
    options = _options_by_item(obj, [item for item in items if item.is_image()])
    salt = salt_of_request(obj)
    ours = []
    for item in items:
        media, tower = media_digests.digest_of(item), towers.tower_for(item)
        # The digest of a tower's inputs already covers the effect of every option.
        owned = item.modality.name.lower() in towers.own_modalities
        asked = {} if owned else options
        key = None
        if media is not None and tower is not None and asked is not None:
            key = _key(tower.identity, media, asked.get(id(item), {}), salt)
        if key is None:
            placeholder_tokens.clear_key(item)
            continue
        placeholder_tokens.assign_key(item, key, epoch=epoch, embedding_only=owned)
        if placeholder_tokens.key_of(item) is not None:
            ours.append(item)
    padded = mm_inputs.padded_input_ids
    if padded is not None:
        for item in ours:
            for start, end in item.offsets or ():
                padded[start : end + 1] = item.padding_sequence(end - start + 1)
    return ours


def _key(tower: bytes, media: bytes, options: Mapping[str, Any], salt: str | None) -> bytes | None:
    try:
        return embedding_key(
            activation.runtime().secret, tower, media_digest_with_options(media, options), salt
        )
    except (TypeError, ValueError):
        return None  # The client's options have no canonical encoding.


def _options_by_item(obj: Any, image_items: list[Any]) -> dict[int, dict[str, Any]] | None:
    """Return a request's processor arguments by item id, or None if arguments and items cannot be matched.

    The arguments are stored under "sglang", because other engines' processors may interpret them differently.
    """
    from sglang.srt.multimodal.cache import media_preprocess_kwargs

    sources = getattr(obj, "image_data", None) or []
    own = [media_preprocess_kwargs(source, defaults=_DEFAULT_OPTIONS) for source in sources]
    whole = getattr(obj, "mm_processor_kwargs", None) or {}
    more = {field: value for field in _REQUEST_FIELDS if (value := getattr(obj, field, None)) is not None}
    if not whole and not any(own) and not more:
        return {}
    if len(own) != len(image_items):
        return None
    # The name "picture" is part of the key. Renaming it would change every key with processor arguments.
    return {
        id(item): {"sglang": {**more, "request": whole, "picture": kwargs}}
        for item, kwargs in zip(image_items, own, strict=True)
    }


# -- SGLang's tokenizer process --------------------------------------------------------------


class _TokenizerState:
    """State of the tokenizer process. There is one instance per process."""

    def __init__(self, processor: Any) -> None:
        self.identifiers = MediaIdentifiers(processor)
        self.prefetcher = EmbeddingPrefetcher(activation.runtime(), activation.tally())
        self.can_prefetch = _is_single_host()
        if not self.can_prefetch:
            compat.logger.warning(
                "cornplug: this server does not share embeddings: with --nnodes, each host has its own store"
            )


def _is_single_host() -> bool:
    """Return whether all ranks use this host's store.

    If one rank lacks an embedding, no rank uses the embedding.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    return bool(resolved_view(get_server_args()).nnodes == 1)


@functools.cache
def _tokenizer_state(processor: Any) -> _TokenizerState:
    return _TokenizerState(processor)


def _on_processor_created(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    if activation.is_on() and manager.mm_processor is not None:
        _tokenizer_state(manager.mm_processor)


async def _tokenize_one_request(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    tokenized = await original(manager, obj)
    mm_inputs = tokenized.mm_inputs if activation.is_on() else None
    if mm_inputs is not None and mm_inputs.mm_items:
        here = _tokenizer_state(manager.mm_processor)
        epoch, towers = await here.identifiers.towers()
        await media_digests.compute_digests(mm_inputs.mm_items, towers.own_modalities)
        items = assign_keys(mm_inputs, towers, obj, epoch=epoch)
        if here.can_prefetch and activation.config().engine.share_embeddings:
            wanted = [item for item in items if item.precomputed_embeddings is None]
            await here.prefetcher.prepare(wanted, towers.tower_for, salt_of_request(obj))
    return tokenized


HOOKS: tuple[Hook, ...] = (
    *media_digests.HOOKS,
    Hook(f"{_MANAGER}.init_tokenizer_and_processor", "after", _on_processor_created),
    Hook(f"{_MANAGER}._tokenize_one_request", "around", _tokenize_one_request),
)
