"""Support for embeddings that an app sends instead of images: by handle, or by value if the operator allows
this.

    part ──vLLM loads its tensors──> `load`: a handle becomes the store's rows
         ──vLLM names its items───> `mm_hash_for`: rows from a handle get the image's name
         ──the request's salt────> `verified_key`: the key is computed, and must equal the handle's

A handle is valid if it is signed with the store's secret and was created for this engine's own model. The
handle's key only locates the embedding rows in the store. A request fails with status 400 if its handle is
invalid or if the rows were evicted, because the request has no pixels from which to compute the rows.

With an encoder-cache connector, vLLM 0.32 accepts embeddings from any client. It even accepts requests
without the embeddings, because it assumes that a connector has them. vLLM's worker then crashes. This module
rejects both kinds of requests.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from vllm.exceptions import VLLMValidationError

from cornplug.config import Config
from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.engine_common import weights_guard
from cornplug.errors import CornplugError
from cornplug.identity import embedding_key
from cornplug.store.base import Store
from cornplug.store.client import open_store
from cornplug.store.payload import get_payload

HANDLE_PREFIX: Final = "cpv1-"
"""Prefix of the `mm_hash` of an embedding that was sent by handle. The media digest and the handle's key
follow. The prefix differs from the prefix for images, because vLLM caches processed inputs by `mm_hash`, and
the inputs for a handle and for an image differ."""
_HANDLE_NAME: Final = re.compile(HANDLE_PREFIX + "([0-9a-f]{64})-([0-9a-f]{64})")
_MAX_REMEMBERED: Final = 65536
"""Maximum number of remembered handles. Each takes a few hundred bytes."""


class ReceivedHandles:
    """Loads and verifies the embeddings that this API process receives by handle, and remembers the handles'
    claims. Thread-safe, because vLLM loads media in threads."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        identity: Callable[[], bytes | None],
        *,
        dtype: str,
        is_only_connector: bool = True,
        by_value: bool = False,
    ) -> None:
        """Prepare to receive handles. `identity` returns the identity of this engine's tower, or None if it
        is unknown or not read yet. If `is_only_connector` is False, another connector's encoder cache may
        have an embedding that a request leaves out. `by_value` is whether requests may send embeddings by
        value."""
        self._config = config
        self._secret = secret
        self._identity = identity
        self._dtype = dtype
        self._is_only_connector = is_only_connector
        self._by_value = by_value
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._claims: OrderedDict[bytes, EmbeddingHandle] = OrderedDict()
        """Verified claims of received handles, by the digest of their rows and image grid."""

    def load(self, text: str) -> torch.Tensor:
        """Return the embedding rows to which the handle `text` refers. Raises VLLMValidationError if the
        handle is invalid or the store no longer has the rows."""
        try:
            claims = EmbeddingHandle.verify(text, self._secret, now=time.time())
            wait_s = self._config.store.background_timeout_s
            found = get_payload(self._get_store(), claims.key, deadline_s=wait_s, recall_s=wait_s)
        except CornplugError as e:
            raise _validation_error(str(e)) from e
        identity = self._identity()
        if claims.identity != identity or claims.dtype != self._dtype or weights_guard.has_replaced_weights():
            here = "unknown" if identity is None else identity.hex()[:12]
            raise _validation_error(
                "the embedding of this handle is from another model, dtype or preprocessing: "
                f"{claims.identity.hex()[:12]}, expected {here}"
            )
        if found is None:
            raise _validation_error(
                "the store no longer has this embedding: encode it again, or send the embedding itself"
            )
        header, payload = found
        if header.dtype != claims.dtype or len(header.shape) != 2:
            raise _validation_error(f"unexpected store entry: {header.dtype} {header.shape}")
        dtype = getattr(torch, header.dtype)
        if len(payload) != math.prod(header.shape) * dtype.itemsize:
            raise _validation_error("the size of the store entry does not match its header")
        rows = torch.frombuffer(payload, dtype=dtype).view(header.shape)
        self.remember(claims, rows)
        return rows

    def remember(self, claims: EmbeddingHandle, rows: torch.Tensor) -> None:
        """Remember a handle's verified claims by the digest of its rows, for later calls of `mm_hash_for`."""
        digest = _rows_digest(rows, claims.grid)
        with self._lock:
            self._claims[digest] = claims
            self._claims.move_to_end(digest)
            while len(self._claims) > _MAX_REMEMBERED:
                self._claims.popitem(last=False)

    def mm_hash_for(self, item: object, modality: str, options: Mapping[str, Any]) -> str | None:
        """Return the `mm_hash` of an embedding item. Return None for an embedding that was sent by value, if
        this server accepts such embeddings.

        Raises VLLMValidationError for an embedding that this server does not accept.
        """
        rows = item.get(f"{modality}_embeds") if isinstance(item, Mapping) else item
        if not isinstance(rows, torch.Tensor):
            if not self._is_only_connector:
                return None
            raise _validation_error(f"{modality}_embeds: the embedding is missing", modality)
        grid = item.get(f"{modality}_grid_thw") if isinstance(item, Mapping) else None
        claims = self._find_claims(
            rows, tuple(grid.flatten().tolist()) if isinstance(grid, torch.Tensor) else ()
        )
        if claims is None or claims.modality != modality:
            if self._by_value or not self._is_only_connector:
                return None
            raise _validation_error(
                f"{modality}_embeds: this server accepts embeddings only by handle, with the grid of the "
                "handle. Start it with --enable-mm-embeds to accept other embeddings",
                modality,
            )
        if options:
            raise _validation_error(
                f"mm_processor_kwargs {sorted(options)}: the embedding was computed without these options",
                modality,
            )
        return f"{HANDLE_PREFIX}{claims.media.hex()}-{claims.key.hex()}"

    def verified_key(self, mm_hash: str, salt: str | None) -> bytes:
        """Return the embedding key that a `mm_hash` from `mm_hash_for` contains. `salt` is the request's
        cache salt.

        Raises VLLMValidationError if the salt differs from the handle's salt. Also raises it if an adapter on
        the tower changed the `mm_hash`, because the embedding was computed without that adapter.
        """
        if weights_guard.has_replaced_weights():
            raise _validation_error("this server's weights were replaced after it read the embedding")
        found = _HANDLE_NAME.fullmatch(mm_hash)
        identity = self._identity()
        if found is None or identity is None:
            raise _validation_error(
                "the embedding was computed without adapters, and the request uses an adapter on the tower"
            )
        media, claimed = (bytes.fromhex(text) for text in found.groups())
        key = embedding_key(self._secret, identity, media, salt)
        if key != claimed:
            raise _validation_error(
                "the handle's salt differs from the cache_salt of this request", "cache_salt"
            )
        return key

    def _find_claims(self, rows: torch.Tensor, grid: tuple[int, ...]) -> EmbeddingHandle | None:
        if not self._claims or rows.ndim != 2:
            return None
        digest = _rows_digest(rows.detach().cpu().contiguous(), grid)
        with self._lock:
            return self._claims.get(digest)

    def _get_store(self) -> Store:
        with self._lock:
            if self._store is None:
                # Receiving a handle must not start a store. The engine starts a store if no store is running.
                self._store = open_store(self._config.store, autostart=False)
            return self._store


def is_handle(data: object) -> bool:
    """Return whether the data of a message part is a string in the form of an embedding handle."""
    return isinstance(data, str) and data.startswith(engine_seal.HANDLE_PREFIX)


def _rows_digest(rows: torch.Tensor, grid: tuple[int, ...]) -> bytes:
    hasher = hashlib.sha256(f"{dtype_name(rows.dtype)} {tuple(rows.shape)} ".encode())
    hasher.update(struct.pack(f">{len(grid)}q", *grid))
    hasher.update(raw_bytes(rows))
    return hasher.digest()


def _validation_error(message: str, parameter: str = "image_embeds") -> VLLMValidationError:
    return cast(VLLMValidationError, VLLMValidationError(f"cornplug: {message}", parameter=parameter))
