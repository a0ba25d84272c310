"""Converts a chat request's images to embeddings, in the API process of an engine without a tower.

    image_url ──parser──> the image's bytes, or an http(s) URL ──> service: fetch, decode, encode
    image_embeds <──rows, whose signed claims match this engine's tower and this salt──┘

The embeddings are then handled like embeddings that an app sends by handle (`media/embedding_handles.py`).
Therefore an image has the same identifier in engines with and without a tower. If the service fails, the
request fails with status 503 before the engine receives it. Requests without images never wait for the
service.

vLLM's exception handlers set only the status and body of a response. The middleware `RetryAfter` adds the
header `Retry-After`.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import torch
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from urllib3.util import parse_url
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.media.base import MediaIO
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker

from cornplug.checkpoints.model_family import PRECISION_VARIABLES
from cornplug.config import IMAGES_PER_PROMPT, Config
from cornplug.encoder_service.client.remote_client import RemoteEncoder
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.encoder_service.formats.messages import MediaReply, MediaRequest, is_media_refusal
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common import weights_guard
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import CodecError, ConfigError, CornplugError, EncoderError, EncoderRefused
from cornplug.identity import embedding_key
from cornplug.private_paths import read_secret
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.flags import all_our_settings, config_from_settings
from cornplug.vllm_connector.media.embedding_handles import ReceivedHandles
from cornplug.vllm_connector.media.mm_identifiers import MmIdentifiers
from cornplug.vllm_connector.media.partial_models import (
    ACCEPTS_EMBEDDINGS,
    runs_without_tower,
)
from cornplug.vllm_connector.model.model_config import tower_identity

_MIN_RETRY_S: Final = 1.0
_retry_delays_s: ContextVar[list[float] | None] = ContextVar("cornplug_retry_after", default=None)
"""Retry delays in seconds for the response to the current HTTP request."""
_START_TIMEOUT_S: Final = 5.0
"""Maximum seconds that an engine at start waits for an encoder service's list of models."""
_DOWN_RETRY_S: Final = 2.0
"""Retry delay in seconds for clients while no service replies. The engine's own health checks of the service
may take as long."""
_salt: ContextVar[str | None] = ContextVar("cornplug_cache_salt", default=None)
"""`cache_salt` of the chat request that is being rendered."""


class ServiceUnavailable(GracefulHTTPError):
    """Error that ends a valid request with status 503, because an image could not be encoded."""

    def __init__(self, why: str, pause_s: float | None) -> None:
        pause = set_retry_after(pause_s)
        super().__init__(
            "the encoder service, which computes image embeddings for this server, returned no embedding: "
            f"{why}; try again in {pause:.0f} s",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class FileBytes(MediaIO[bytes]):
    """Loader that returns the bytes of a `data:` or `file:` URL without decoding an image. vLLM's own rules
    for these URLs apply."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return base64.b64decode(data, validate=True)

    def load_file(self, filepath: Path) -> bytes:
        return filepath.read_bytes()


class ServedImages:
    """Client that requests embeddings of one engine's images from the encoder service. Thread-safe. Call
    `close` when the client is no longer used."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        tower: Callable[[], TowerIdentity | None],
        handles: ReceivedHandles,
        *,
        family: str,
        dtype: str,
        max_images: int | None = None,
    ) -> None:
        """Create a client. `tower` returns the identity of the checkpoint's tower, or None if the identity is
        not known yet. `family` is the model's `model_type`. `max_images` is the maximum number of images in a
        prompt, or None for no limit."""
        self._config = config
        self._secret = secret
        self._tower = tower
        self._handles = handles
        self._needs_grid = ACCEPTS_EMBEDDINGS[family]
        self._dtype = dtype
        self._max_images = max_images
        self._client = RemoteEncoder(config.encoder.engine_weights(), secret)

    def check(self, tower: TowerIdentity, model: str) -> None:
        """Raise ConfigError if a service that replies does not have this checkpoint's tower. Also raise it if
        the engine's settings make it impossible for any service to have this tower.

        If a service is not available, this only logs a warning.
        """
        if tower.served_identity is None:
            raise ConfigError(
                "--cornplug-tower service",
                f"this engine's settings change the embeddings of {model}, but the encoder service uses the "
                "checkpoint's settings",
                "Remove --mm-processor-kwargs and other settings of the tower, or --cornplug-tower.",
            )
        for url in self._config.encoder.engine_weights():
            with RemoteEncoder([url], self._secret) as client:
                try:
                    models = client.describe(_START_TIMEOUT_S)
                except (EncoderError, TimeoutError) as e:
                    compat.logger.warning(
                        "cornplug: requests with images get status 503 until an encoder service replies: %s",
                        e,
                    )
                    continue
            if not any(tower.served_identity == one.identity_for("image") for one in models):
                raise ConfigError(
                    "--cornplug-encoder",
                    f"the service at {url} has the towers of {', '.join(one.name for one in models)} in "
                    f"{', '.join(sorted({one.dtype for one in models}))}, but not the tower of {model} in "
                    f"{self._dtype}",
                    f"Start the service with --model {model} --dtype {self._dtype}, from the same files and "
                    f"with the same values of {', '.join(PRECISION_VARIABLES)}.",
                )

    def check_count(self, count: int) -> None:
        """Raise VLLMValidationError if `count`, the number of images in a prompt, exceeds the operator's
        limit."""
        most = self._max_images
        if most is not None and count > most:
            raise VLLMValidationError(
                f"At most {most} image(s) may be provided in one prompt.", parameter="image", value=count
            )

    async def request_item(self, url: str, connector: Any, salt: str | None) -> Any:
        """Request the embedding of the image at `url` from the service. Return it as an item for vLLM's
        processor. Raises ServiceUnavailable and VLLMValidationError."""
        if _is_remote(url, connector):
            request = self._create_request(salt, url=url)
        else:
            request = self._create_request(salt, data=await connector.load_from_url_async(url, FileBytes()))
        try:
            reply = await asyncio.wrap_future(self._client.submit_media(request))
        except EncoderError as e:
            raise _convert_error(e) from e
        return self._verify_reply(reply, salt)

    def request_item_sync(self, url: str, connector: Any, salt: str | None) -> Any:
        """Return the same as `request_item`, synchronously, for an engine without an event loop."""
        if _is_remote(url, connector):
            request = self._create_request(salt, url=url)
        else:
            request = self._create_request(salt, data=connector.load_from_url(url, FileBytes()))
        try:
            reply = self._client.submit_media(request).result()
        except EncoderError as e:
            raise _convert_error(e) from e
        return self._verify_reply(reply, salt)

    def close(self) -> None:
        """Close all connections to the encoder service."""
        self._client.close()

    def _create_request(self, salt: str | None, *, data: bytes = b"", url: str = "") -> MediaRequest:
        if not data and not url:
            raise VLLMValidationError("the image is empty", parameter="image_url")
        return MediaRequest(
            identity=self._served_identity(),
            modality="image",
            data=data,
            url=url,
            cache_salt=salt,
            app=self._config.engine.app,
            deadline_s=self._config.encoder.language_only_timeout_s,
            decoding=compat.decoding_rule(),
        )

    def _served_identity(self) -> bytes:
        """Return the model identity to send to the service. Raises ServiceUnavailable while the identity is
        unknown."""
        if weights_guard.has_replaced_weights():
            raise ServiceUnavailable("this server's weights were replaced", _DOWN_RETRY_S)
        tower = self._tower()
        if tower is None or tower.served_identity is None:
            raise ServiceUnavailable("this server has not identified its checkpoint yet", _DOWN_RETRY_S)
        return tower.served_identity

    def _verify_reply(self, reply: MediaReply, salt: str | None) -> Any:
        """Check a reply's signature and embedding against this engine, and return the item for vLLM's
        processor. Raises ServiceUnavailable if the reply does not match."""
        try:
            claims = EmbeddingHandle.verify(reply.handle, self._secret, now=time.time())
        except CodecError as e:
            raise ServiceUnavailable(str(e), None) from e
        identity, tensor = self._served_identity(), reply.tensor
        if reply.decoding != compat.decoding_rule():
            raise ServiceUnavailable(
                f"it decodes images with {reply.decoding}, but this server needs {compat.decoding_rule()}; "
                "update cornplug on the encoder service",
                None,
            )
        key = embedding_key(self._secret, identity, claims.media, salt)
        told = (claims.identity, claims.key, claims.modality, claims.dtype, tensor.dtype, len(tensor.shape))
        if told != (identity, key, "image", self._dtype, self._dtype, 2):
            raise ServiceUnavailable(
                f"it sent an embedding of {claims.modality} {claims.identity.hex()[:12]} in {claims.dtype}, "
                f"but this server needs {identity.hex()[:12]} in {self._dtype}",
                None,
            )
        dtype = getattr(torch, tensor.dtype)
        if len(tensor.data) != math.prod(tensor.shape) * dtype.itemsize:
            raise ServiceUnavailable("the size of its reply does not match the header", None)
        rows = torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)
        self._handles.remember(claims, rows)
        return {"image_embeds": rows, "image_grid_thw": list(claims.grid)} if self._needs_grid else rows


def on_engine_start(config: Any, names: MmIdentifiers | None) -> None:
    """Use the encoder service for images in this process's requests, if the starting engine has no tower.

    Reads the checkpoint's weights once. Raises ConfigError if the checkpoint cannot be identified, and the
    same errors as `ServedImages.check`.
    """
    global _active
    deactivate()
    if names is None or not runs_without_tower(config):
        return
    carried = all_our_settings(config)
    said = config_from_settings(carried)
    model = config.model_config
    try:
        known = tower_identity(config)
    except CornplugError as e:
        raise ConfigError(
            "--cornplug-tower service",
            f"cannot identify the tower of {model.model}, or compare it with the tower of a service: {e}",
            "Remove the option.",
        ) from e
    served = ServedImages(
        said,
        read_secret(said.store.secret_file),
        names.current_tower,
        names.handles,
        family=str(model.hf_config.model_type),
        dtype=dtype_name(model.dtype),
        max_images=carried[-1].get(IMAGES_PER_PROMPT),
    )
    try:
        served.check(known, str(model.model))
    except ConfigError:
        served.close()
        raise
    for module, target, wrapper in RETRY_AFTER_WRAPS:
        compat.wrap(module, target, wrapper)
    _active = served


def deactivate() -> None:
    """Stop using the encoder service for images in this process's requests, so that vLLM handles them."""
    global _active
    if _active is not None:
        _active.close()
    _active = None


_active: ServedImages | None = None


def _is_remote(url: str, connector: Any) -> bool:
    """Return whether the service, and not this process, fetches the image at this URL. Raises vLLM's error if
    `--allowed-media-domains` excludes the URL's host."""
    if url[:5].lower() == "data:":
        return False
    parts = parse_url(url)
    if parts.scheme not in ("http", "https"):
        return False
    connector._assert_url_in_allowed_media_domains(parts)
    return True


def _convert_error(e: EncoderError) -> Exception:
    if isinstance(e, EncoderRefused) and is_media_refusal(e.reason):
        return VLLMValidationError(str(e), parameter="image_url")
    pause_s = getattr(e, "retry_after_s", None)
    return ServiceUnavailable(str(e), _DOWN_RETRY_S if pause_s is None else pause_s)


def _create_parser(original: Callable[..., Any], tracker: Any, *args: Any, **kwargs: Any) -> Any:
    parser = original(tracker, *args, **kwargs)
    if _active is not None:
        parser.parse_image = functools.partial(_parse_image, _active, tracker, parser)
    return parser


def _parse_image(
    served: ServedImages, tracker: Any, parser: Any, image_url: str | None, uuid: str | None = None
) -> None:
    """Parse an image of a chat message as an embedding item. Replaces a method of vLLM's content parsers."""
    if not image_url:
        raise VLLMValidationError(
            "this server has no vision tower and does not keep images: send the image together with its uuid",
            parameter="image_url",
        )
    if (tracker.media_io_kwargs or {}).get("image"):
        raise VLLMValidationError(
            "image: the encoder service decodes the images of this server, with vLLM's defaults. Remove "
            "this option",
            parameter="media_io_kwargs",
        )
    served.check_count(len(tracker._items_by_modality["image_embeds"]) + 1)
    salt = _salt.get()
    item: Any
    if isinstance(tracker, AsyncMultiModalItemTracker):

        async def later() -> tuple[Any, str | None]:
            return await served.request_item(image_url, parser._connector, salt), uuid

        item = later
    else:
        item = served.request_item_sync(image_url, parser._connector, salt), uuid
    parser._add_placeholder("image", tracker.add("image_embeds", item))


def _set_salt(prompt_extras: Mapping[str, Any] | None) -> Any:
    return _salt.set((prompt_extras or {}).get("cache_salt"))


def _render_chat(original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
    token = _set_salt(kwargs.get("prompt_extras"))
    try:
        return original(this, *args, **kwargs)
    finally:
        _salt.reset(token)


async def _render_chat_async(original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
    token = _set_salt(kwargs.get("prompt_extras"))
    try:
        return await original(this, *args, **kwargs)
    finally:
        _salt.reset(token)


def set_retry_after(seconds: float | None) -> float:
    """Set the retry delay for the response to the current request. It is used if the response has status 503.
    Returns the delay in seconds, at least `_MIN_RETRY_S` and rounded up."""
    pause_s = math.ceil(max(_MIN_RETRY_S, seconds or 0.0))
    noted = _retry_delays_s.get()
    if noted is not None:
        noted.append(pause_s)
    return pause_s


class RetryAfter:
    """ASGI middleware that adds the header `Retry-After` to responses with status 503. `set_retry_after`
    sets the delay."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Tasks of this request have copies of the context, and all copies refer to this list.
        noted: list[float] = []

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503 and noted:
                MutableHeaders(scope=message)["retry-after"] = f"{max(noted):.0f}"
            await send(message)

        token = _retry_delays_s.set(noted)
        try:
            await self._app(scope, receive, marked)
        finally:
            _retry_delays_s.reset(token)


def _init_exception_handler(original: Callable[..., Any], app: Any) -> None:
    original(app)
    app.add_middleware(RetryAfter)


RETRY_AFTER_WRAPS: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    ("vllm.entrypoints.launchers.app", "init_exception_handler", _init_exception_handler),
)
"""Wrappers for API processes of an engine without a tower. Other processes would have to import this vLLM
module first."""


WRAPS: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    ("vllm.renderers.chat_utils", "MultiModalItemTracker.create_parser", _create_parser),
    ("vllm.renderers.chat_utils", "AsyncMultiModalItemTracker.create_parser", _create_parser),
    ("vllm.renderers.base", "BaseRenderer.render_chat", _render_chat),
    ("vllm.renderers.base", "BaseRenderer.render_chat_async", _render_chat_async),
)
