"""Replaces vLLM's media identifiers with content keys.

vLLM names an image by a hash of the model's *name* and the image file's bytes, by a client's uuid, or by an
EXIF ImageID that any client can set. vLLM uses that name as a key in its encoder cache, its prefix cache and
every connector. The API process replaces that name with

    mm_hash    = "cp1-" + hex(media digest)      keys vLLM's processor cache
    identifier = "cp1-" + hex(embedding key)     keys encoder cache, blocks, and cornplug's store

The new names also make the keys of the engine's own caches depend on the content. A request may get its names
before a weight update and be computed after it. Therefore, after weights from another checkpoint were loaded,
"-" and the epoch (update counter) of the weights are appended to names, and a request with an old epoch is
not shared. An embedding that was sent by handle (`embedding_handles.py`) gets the identifier of its image.
`video_digest.py` computes the digests of videos. Media without a digest (audio in this release, and videos
with unknown fields) and media of an unidentified model are not shared. They keep a name from vLLM or from
this engine, which cannot look like a key.

A name is trusted only if it is a `MediaName`, which is created together with the inputs that it identifies.
Names that arrive with a request's own inputs (`/inference/v1/generate`, gRPC) are plain strings. A plain
string that looks like one of cornplug's names is replaced, and the media item is not shared. A server that
accepts such requests, for example from `vllm launch render` (used by llm-d), logs this at start. Signed names
would not help, because a client can render a media item to get its true name, and could then send the name
with other inputs.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from cornplug.config import EMBEDDINGS_BY_VALUE
from cornplug.encoder_service.formats.image import digest_image
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.engine_common.shared_flags import load_settings
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.errors import ConfigError
from cornplug.identity import array_digest, digest, embedding_key, media_digest_with_options
from cornplug.private_paths import read_secret
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.flags import all_our_settings
from cornplug.vllm_connector.media.embedding_handles import HANDLE_PREFIX as HANDLE
from cornplug.vllm_connector.media.embedding_handles import ReceivedHandles, is_handle
from cornplug.vllm_connector.media.video_digest import (
    VideoNotShared,
    check_options,
    looks_unshared,
    unshared_name,
    video_digest,
)
from cornplug.vllm_connector.model.model_config import (
    processor_arguments,
    tower_identity,
    why_no_videos,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "cp1-"
LOCAL_PREFIX: Final = "local-"

PROCESSED_NOT_SHARED: Final = (
    "requests with media from another process (/inference/v1/generate) share neither embeddings nor the KV "
    "after their first media item. Text is shared. Send images to /v1/chat/completions to share them"
)
_KEY_NAME: Final = re.compile(PREFIX + "([0-9a-f]{64})(?:-([0-9]+))?")
_MAX_UUIDS: Final = 65536


class MediaName(str):
    """Name of a media item that `_get_mm_hashes` derived from the item's content in this process. Names that
    arrive in messages never have this type."""

    __slots__ = ()


def key_of(identifier: str, epoch: int = 0) -> bytes | None:
    """Return the embedding key (32 bytes) that an identifier contains. Return None if it contains no key, or
    a key of another epoch."""
    found = _KEY_NAME.fullmatch(identifier)
    return bytes.fromhex(found[1]) if found is not None and int(found[2] or 0) == epoch else None


def is_stale(identifier: str, epoch: int) -> bool:
    """Return whether an identifier contains an embedding key of another epoch of the weights."""
    found = _KEY_NAME.fullmatch(identifier)
    return found is not None and int(found[2] or 0) != epoch


def _format_identifier(key: bytes, epoch: int) -> str:
    return f"{PREFIX}{key.hex()}-{epoch}" if epoch else PREFIX + key.hex()


class MmIdentifiers:
    """Computes the names (`mm_hash`) and identifiers of media items in this API process, from their content
    and the model's identity."""

    def __init__(self, config: VllmConfig, extra: Mapping[str, Any]) -> None:
        ours = load_settings(extra)
        self._secret = read_secret(ours.store.secret_file)
        ec = config.ec_transfer_config
        self.handles = ReceivedHandles(
            ours,
            self._secret,
            self._current_identity,
            dtype=dtype_name(config.model_config.dtype),
            is_only_connector=ec is None or ec.ec_connector == EC_CONNECTOR,
            by_value=bool(extra.get(EMBEDDINGS_BY_VALUE)),
        )
        self._processor_kwargs = dict(config.model_config.get_multimodal_config().mm_processor_kwargs or {})
        self._deployment_options = processor_arguments(config)
        # Check this before computing a video's digest. vLLM's own hash is cheaper, because it hashes the
        # file.
        self._why_no_videos = why_no_videos(config)
        # The first read of a large checkpoint takes seconds, so the identity is computed in the background.
        self._tower = CurrentIdentity(lambda: tower_identity(config), "embeddings", compat.logger.warning)
        # Requests may wait for the identity only for a limited time, which starts now. A wait blocks the API
        # server's event loop and therefore every client. Until the checkpoint has been read, later requests
        # get names that only this engine uses.
        self._tower.current()[1].initial_wait_s()
        self._uuids: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """Media digests by (modality, uuid), for later requests that contain only a uuid."""
        self._lock = threading.Lock()

    def _current_identity(self) -> bytes | None:
        _, tower = self._epoch_and_tower()
        return tower.identity if tower is not None else None

    def current_tower(self) -> TowerIdentity | None:
        """Return the identity of the tower with the current weights, or None if it is unknown or not read
        yet."""
        return self._epoch_and_tower()[1]

    def _epoch_and_tower(self) -> tuple[int, TowerIdentity | None]:
        """Return (epoch of the weights, identity of the tower in this epoch). The identity is None if
        unknown."""
        epoch, identity = self._tower.current()
        identity.wait_initially()
        return epoch, identity.value

    def media_name(self, item: object, uuid: str | None, options: Mapping[str, Any]) -> str | None:
        """Return the `mm_hash` of an image, or None if cornplug cannot compute a digest for it.

        If `item` is None, the digest of an earlier image with the same uuid is used.
        """
        media = self._digest_for_uuid("image", uuid) if item is None else _media_digest(item)
        return None if media is None else self._create_name("image", media, uuid, options)

    def video_name(
        self, video: object, metadata: object, uuid: str | None, options: Mapping[str, Any]
    ) -> str | None:
        """Return the `mm_hash` of a video, or None if `video` is None and its uuid is unknown.

        Raises VideoNotShared if the video cannot be shared.
        """
        if self._why_no_videos:
            raise VideoNotShared("videos of this model are not shared", reason=self._why_no_videos)
        check_options(self._deployment_options)
        check_options(options)
        media = self._digest_for_uuid("video", uuid) if video is None else video_digest(video, metadata)
        return None if media is None else self._create_name("video", media, uuid, options)

    def _create_name(
        self, modality: str, media: bytes, uuid: str | None, options: Mapping[str, Any]
    ) -> str | None:
        if uuid is not None:
            with self._lock:
                self._uuids[modality, uuid] = media
                self._uuids.move_to_end((modality, uuid))
                if len(self._uuids) > _MAX_UUIDS:
                    self._uuids.popitem(last=False)
        try:
            return PREFIX + media_digest_with_options(media, options).hex()
        except (TypeError, ValueError):
            return None

    def _digest_for_uuid(self, modality: str, uuid: str | None) -> bytes | None:
        with self._lock:
            return self._uuids.get((modality, uuid)) if uuid is not None else None

    def create_identifier(self, mm_hash: str, salt: str | None, modality: str = "image") -> str:
        """Return the identifier of a media item from its `mm_hash`, which `media_name`, `video_name` or
        `ReceivedHandles.mm_hash_for` returned. `salt` is the request's cache salt.

        Raises VLLMValidationError for a handle that was created with another salt.
        """
        epoch, tower = self._epoch_and_tower()
        if HANDLE in mm_hash:
            return _format_identifier(self.handles.verified_key(mm_hash, salt), epoch)
        media = bytes.fromhex(mm_hash[len(PREFIX) :])
        own = None if tower is None else tower.for_modality(modality)
        if own is None:
            # Without an identified model, the name identifies only the content. It is therefore used only in
            # this engine's caches.
            name = LOCAL_PREFIX + digest("cornplug-local-v1", media, repr(salt).encode()).hex()
            return name if tower is None else unshared_name(name, tower.why_no_videos)
        return _format_identifier(embedding_key(self._secret, own.identity, media, salt), epoch)

    def changed_options(self, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor arguments of a request that differ from the deployment's arguments."""
        return {
            k: v
            for k, v in hf_processor_mm_kwargs.items()
            if k not in self._processor_kwargs or self._processor_kwargs[k] != v
        }


def add_start_watcher(watcher: Callable[[VllmConfig, MmIdentifiers | None], None]) -> None:
    """Call `watcher` whenever this process starts an engine. Its arguments are the engine's VllmConfig and
    `MmIdentifiers`, or None if the engine has no `MmIdentifiers`."""
    if watcher not in _watchers:
        _watchers.append(watcher)


def _media_digest(item: object) -> bytes | None:
    import torch

    if isinstance(item, Image.Image):
        # vLLM converts images to RGB unless `image_mode` (media_io_kwargs) sets another mode. The model's
        # processor then converts images by its own rules, so these images have no digest.
        return digest_image(item) if item.mode == "RGB" else None
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().numpy() if item.dtype != torch.bfloat16 else None
    if isinstance(item, np.ndarray):
        array = np.ascontiguousarray(item)
        return array_digest(array.dtype.name, array.shape, array.tobytes())
    return None


_active: MmIdentifiers | None = None
_watchers: list[Callable[[VllmConfig, MmIdentifiers | None], None]] = []
_has_connectors = False
"""Whether this engine has cornplug's connectors, which must not use a client's uuid as a key."""


def _input_processor_init(
    original: Callable[..., Any], this: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any
) -> None:
    original(this, vllm_config, *args, **kwargs)
    _create_identifiers(vllm_config)
    for watcher in _watchers:
        watcher(vllm_config, _active)


def _create_identifiers(vllm_config: VllmConfig) -> None:
    global _active, _has_connectors
    extras = all_our_settings(vllm_config)
    if not extras or vllm_config.model_config.multimodal_config is None:
        return
    _has_connectors = True
    extra = dict(extras[-1])
    try:
        _active = MmIdentifiers(vllm_config, extra)
    except ConfigError as e:
        # An engine with its own tower starts even if the secret file cannot be read, and shares nothing.
        if e.field != "store.secret_file" or load_settings(extra).engine.tower == "service":
            raise
        compat.logger.error("cornplug: embeddings of this engine are not shared: %s", e)


def _get_mm_hashes(original: Callable[..., Any], this: Any, inputs: Any) -> Any:
    theirs = original(this, inputs)
    active = _active
    if active is None:
        return (
            {m: [_foreign_name(name) for name in names] for m, names in theirs.items()}
            if _has_connectors
            else theirs
        )
    from vllm.multimodal.parse import (
        DictEmbeddingItems,
        EmbeddingItems,
        ProcessorBatchItems,
        VideoProcessorItems,
    )

    uuids = inputs.mm_uuid_items or {}
    options = active.changed_options(inputs.hf_processor_mm_kwargs)
    ours: dict[str, list[str]] = {}
    for modality, names in theirs.items():
        items = inputs.mm_data_items[modality]
        if isinstance(items, EmbeddingItems | DictEmbeddingItems):
            found = (active.handles.mm_hash_for(items.get(i), modality, options) for i in range(len(names)))
            ours[modality] = [_choose_name(known, name) for known, name in zip(found, names, strict=True)]
            continue
        given = uuids.get(modality) or [None] * len(names)
        if modality == "video" and isinstance(items, VideoProcessorItems):
            named = [_video_name(active, items, i, given[i], options, name) for i, name in enumerate(names)]
        elif modality == "image" and isinstance(items, ProcessorBatchItems):
            named = [active.media_name(items.get(i), given[i], options) for i in range(len(names))]
        else:
            named = [None] * len(names)
        ours[modality] = [_choose_name(known, name) for known, name in zip(named, names, strict=True)]
    return ours


def _choose_name(content_name: str | None, vllm_name: str) -> str:
    """Return the name to use for an item: `content_name`, which cornplug derived from the item's content, or
    vLLM's name if `content_name` is None."""
    return MediaName(content_name) if content_name is not None else _foreign_name(vllm_name)


def _video_name(
    active: MmIdentifiers, items: Any, i: int, uuid: str | None, options: Mapping[str, Any], vllm_name: str
) -> str | None:
    """Return the `mm_hash` of item `i` in vLLM's VideoProcessorItems. If the video is not shared, the name
    contains the reason.

    If the model's processor does not receive metadata, vLLM keeps the metadata separately from the frames.
    """
    item = items.get(i)
    beside = items.metadata[i] if isinstance(items.metadata, list) else items.metadata
    frames, metadata = item if isinstance(item, tuple) else (item, beside)
    try:
        return active.video_name(frames, metadata, uuid, options)
    except VideoNotShared as e:
        # A later request that contains only the uuid must get the same name. Use vLLM's name, which contains
        # no reason.
        return None if uuid is not None else unshared_name(vllm_name, e.reason)


def _foreign_name(name: str) -> str:
    """Return vLLM's own name for a media item, which may be a client's uuid. If the name looks like one of
    cornplug's names, add a prefix."""
    ours = name.startswith((PREFIX, LOCAL_PREFIX, HANDLE)) or looks_unshared(name)
    return f"foreign-{name}" if ours else name


def _load_embedding(original: Callable[..., Any], this: Any, media_type: str, data: str) -> Any:
    if _active is not None and is_handle(data):
        return _active.handles.load(data)
    return original(this, media_type, data)


def _process_inputs(original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
    request = original(this, *args, **kwargs)
    if _active is not None or _has_connectors:
        for feature in request.mm_features or ():
            if isinstance(feature.mm_hash, MediaName):
                _set_identifier(feature, request.cache_salt)
            else:
                _replace_untrusted_name(feature)
    return request


def _set_identifier(feature: Any, salt: str | None) -> None:
    """Set the identifier of a media item whose name this process derived from the item's content."""
    active, name = _active, feature.mm_hash
    if active is not None:
        if name.startswith(HANDLE):
            feature.identifier = active.create_identifier(feature.identifier, salt)
        # With a LoRA adapter on the tower, vLLM adds a prefix to the identifier. Such an embedding is not
        # shared.
        elif feature.identifier == name and name.startswith(PREFIX):
            feature.identifier = active.create_identifier(name, salt, feature.modality)
    # vLLM sends both names to the engine's process.
    feature.mm_hash, feature.identifier = str(name), str(feature.identifier)


def _replace_untrusted_name(feature: Any) -> None:
    """Replace a media item's name if it arrived with a request and looks like one of cornplug's names.

    Both `mm_hash` and the identifier are replaced, because `mm_hash` identifies the processed inputs that the
    engine core's process caches.
    """
    name = feature.mm_hash
    foreign = _foreign_name(name)
    if foreign != name:
        adapter = feature.identifier.removesuffix(name)
        feature.mm_hash, feature.identifier = foreign, unshared_name(adapter + foreign, "named_by_client")


def accepts_processed_inputs(args: Any) -> bool:
    """Return whether a server with these command-line arguments accepts processed inputs over HTTP."""
    return bool(getattr(args, "enable_scale_out", False) or getattr(args, "tokens_only", False))


def _init_scale_out_state(
    original: Callable[..., Any], state: Any, args: Any, engine_client: Any, *rest: Any, **kwargs: Any
) -> Any:
    result = original(state, args, engine_client, *rest, **kwargs)
    config = engine_client.vllm_config
    if (
        accepts_processed_inputs(args)
        and config.model_config.multimodal_config is not None
        and all_our_settings(config)
    ):
        compat.logger.warning("cornplug: %s.", PROCESSED_NOT_SHARED)
    return result


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.input_processor", "InputProcessor.__init__", _input_processor_init),
    ("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", _process_inputs),
    ("vllm.multimodal.processing.processor", "BaseMultiModalProcessor._get_mm_hashes", _get_mm_hashes),
    ("vllm.multimodal.media.image", "ImageEmbeddingMediaIO.load_base64", _load_embedding),
    ("vllm.entrypoints.scale_out.factories", "init_scale_out_state", _init_scale_out_state),
)
