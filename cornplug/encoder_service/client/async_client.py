"""asyncio client for one or several encoder services. It does not need torch.

    item   ──MediaPayload──> ranking by content ──> RetrySequence ──> POST ──> EmbeddingRef
                                    └─ next service <── CircuitBreakers <──┘ down, busy, bad response

A retry is always safe, because the key of an embedding is a digest of the media item's content.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack

import httpx
from PIL import Image

from cornplug.checkpoints.families import Modality
from cornplug.config import load
from cornplug.encoder_service.client import endpoints, retry
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.client.endpoints import configured_urls, is_local_url, open_local_store
from cornplug.encoder_service.client.retry import (
    MIN_ATTEMPT_S,
    CircuitBreakers,
    RemoteFailure,
    RetryLater,
    RetryPause,
    RetrySequence,
    SendAttempt,
)
from cornplug.encoder_service.formats import engine_seal, messages
from cornplug.encoder_service.formats.messages import Decoding
from cornplug.errors import CornplugError, EncoderError, EncoderUnavailable, MediaError
from cornplug.host import tls_context
from cornplug.identity import pixels_digest
from cornplug.qos import APP_HEADER, CLASS_HEADER
from cornplug.store.base import Store

CONCURRENCY: Final = 32
"""Maximum number of items in flight in one `encode_many` call."""

Services = str | Sequence[str] | Mapping[str, float]
"""One URL, several URLs, or {url: weight}."""
T = TypeVar("T")
MediaInput = str | os.PathLike[Any] | bytes | Image.Image
"""A path, the bytes of a file, or a PIL image."""
Item = MediaInput | Mapping[Modality, MediaInput]
"""An image, or {"image" | "video" | "audio": media}."""
Result = tuple[int, EmbeddingRef | CornplugError]


class EncoderClientOptions(TypedDict, total=False):
    """Options of `AsyncEncoderClient` and `EncoderClient`, given as keyword arguments. An option that is None
    has its default."""

    store: Store | None
    """Store in which services save embeddings, and from which this client reads and verifies them. If
    `services` is not set, the default is this host's store for the configured services on this host."""
    deadline_s: float | None
    """Maximum seconds to wait for one embedding, including reading the media item and retries. The default is
    `encoder.deadline_s`."""
    api_key: str | None
    """Key that is sent as `Authorization: Bearer`."""
    app: str | None
    """App name by which the service counts and classifies the requests. The default is the service's default
    app."""
    service_class: str | None
    """Service class to request. The default is the class of the key or app."""
    decoding: Decoding | None
    """Engine that will use the embeddings (`messages.Decoding`). It determines how images are decoded. The
    default is the newest vLLM that cornplug supports."""
    transport: httpx.AsyncBaseTransport | None
    """httpx transport for tests and proxies. Proxies from the environment (`http_proxy`) are not used."""


class AsyncEncoderClient:
    """Client that requests embeddings of media over HTTP.

    Use it from one event loop, and call `close` or use it in `async with`.

    Args:
        services: One URL, several URLs, or {url: weight}. Each media item is hashed to a preferred service,
            so that a repeated item goes to the service that has it cached. The default is `encoder.urls`, or
            `encoder.host` and `encoder.port` if `encoder.urls` is not set.
        options: See `EncoderClientOptions`.
    """

    def __init__(self, services: Services | None = None, **options: Unpack[EncoderClientOptions]) -> None:
        unknown = options.keys() - EncoderClientOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        config = load()
        store = options.get("store")
        self._services = endpoints.parse_services(services or configured_urls(config))
        self._deadline_s = options.get("deadline_s") or config.encoder.deadline_s
        self._stores = dict.fromkeys(self._services, store)
        self._own_store: Store | None = None
        if store is None and services is None:
            near = self._own_store = open_local_store(config)
            self._stores = {url: near if is_local_url(url) else None for url in self._services}
        self.circuits = CircuitBreakers(self._services, random.random)
        self._http = httpx.AsyncClient(
            headers=_headers(options),
            transport=options.get("transport"),
            verify=tls_context(),
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=CONCURRENCY),
        )

    async def encode(
        self,
        image: MediaInput | None = None,
        *,
        model: str,
        video: MediaInput | None = None,
        audio: MediaInput | None = None,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
    ) -> EmbeddingRef:
        """Return the embedding of one media item, passed as `image`, `video` or `audio`: a path, the bytes of
        a file, or (images only) a PIL image.

        Raises EncoderUnavailable with the reason "encoder_down", "encoder_timeout", "encoder_bad_response",
        or "encoder_backoff" if all services failed recently. Raises EncoderRefused with the service's reason
        and message, and MediaError("not_found") or ("unprocessable").
        """
        given = {"image": image, "video": video, "audio": audio}
        item: Any = {modality: medium for modality, medium in given.items() if medium is not None}
        return await self.encode_item(item, model=model, cache_salt=cache_salt, deadline_s=deadline_s)

    async def encode_item(
        self, item: Item, *, model: str, cache_salt: str | None = None, deadline_s: float | None = None
    ) -> EmbeddingRef:
        """Return the embedding of an image or of {"image" | "video" | "audio": media}. See `encode`."""
        began = time.monotonic()
        # A PIL image is encoded as PNG. This takes 0.1 s for a large image.
        medium = await asyncio.to_thread(MediaPayload.from_item, item)

        async def send(url: str, timeout_s: float) -> EmbeddingRef:
            return await self._encode_at_service(url, timeout_s, medium, model, cache_salt)

        return await self._send_with_retries(medium.content, send, deadline_s, began)

    async def encode_many(
        self,
        items: Iterable[Item],
        *,
        model: str,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
        concurrency: int = CONCURRENCY,
    ) -> AsyncIterator[Result]:
        """Yield (index, reference or error) for each item when it finishes, in any order.

        `deadline_s` applies to each item, from the time when it is read from the iterable. At most
        `concurrency` items are in flight, and the next item is read when an item finishes. Therefore a
        generator of millions of items needs little memory.
        """
        waiting = iter(enumerate(items))
        ended: asyncio.Queue[asyncio.Task[EmbeddingRef]] = asyncio.Queue()
        in_flight: dict[asyncio.Task[EmbeddingRef], int] = {}
        try:
            while True:
                for index, item in itertools.islice(waiting, concurrency - len(in_flight)):
                    task = asyncio.create_task(
                        self.encode_item(item, model=model, cache_salt=cache_salt, deadline_s=deadline_s)
                    )
                    task.add_done_callback(ended.put_nowait)
                    in_flight[task] = index
                if not in_flight:
                    return
                task = await ended.get()
                index = in_flight.pop(task)
                result: EmbeddingRef | CornplugError
                try:
                    result = task.result()
                except CornplugError as e:
                    result = e
                yield index, result
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def models(self) -> list[dict[str, Any]]:
        """Return the models of the first service that responds.

        Each model is a dict with name, family, identity and fingerprints (hex), dtype, and hidden_size.
        """

        async def send(url: str, timeout_s: float) -> list[dict[str, Any]]:
            return retry.parse_models(
                await endpoints.send_request(self._http, "GET", f"{url}/v1/models", timeout_s)
            )

        return await self._send_with_retries(b"", send, None, time.monotonic())

    async def close(self) -> None:
        """Close the connections. References stay valid, because each has its own copy of the bytes."""
        await self._http.aclose()
        if self._own_store is not None:
            self._own_store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _send_with_retries(
        self,
        content: bytes,
        send: Callable[[str, float], Awaitable[T]],
        deadline_s: float | None,
        began: float,
    ) -> T:
        """Call `send(url, timeout_s)` for one service after another. Return the first result.

        The deadline counts from `began`.
        """
        deadline_s, now = deadline_s or self._deadline_s, time.monotonic()
        left_s = began + deadline_s - now
        if left_s < MIN_ATTEMPT_S:
            raise EncoderUnavailable(
                f"reading the medium took longer than the deadline of {deadline_s:g} s",
                reason="encoder_timeout",
            )
        order = endpoints.rank_services(content, self._services)
        attempts = RetrySequence(order, self.circuits, now=now, deadline_s=left_s, random=random.random)
        last: EncoderError | None = None
        while (step := attempts.next_step(time.monotonic())) is not None:
            if isinstance(step, RetryPause):
                await asyncio.sleep(step.seconds)
                continue
            try:
                return await self._send_attempt(step, send)
            except RetryLater as busy:
                last = busy.refusal
            except RemoteFailure as failed:
                last = failed.refusal
            except EncoderUnavailable as e:
                # An earlier error says more than the timeout of a short last attempt.
                if last is None or e.reason != "encoder_timeout":
                    last = e
        raise last or EncoderUnavailable(
            f"{', '.join(order)} failed recently or requested a pause", reason="encoder_backoff"
        )

    async def _send_attempt(self, step: SendAttempt, send: Callable[[str, float], Awaitable[T]]) -> T:
        sent = time.monotonic()
        try:
            async with asyncio.timeout(step.timeout_s):
                made = await send(step.url, step.timeout_s)
        except RetryLater as busy:
            self.circuits.record_refusal(step.url, time.monotonic(), busy.retry_after_s)
            raise
        except (EncoderUnavailable, httpx.HTTPError, TimeoutError) as e:
            self.circuits.record_failure(step.url, time.monotonic(), sent_at=sent)
            raise e if isinstance(e, EncoderUnavailable) else _unavailable(step.url, e) from e
        except (RemoteFailure, EncoderError):
            self.circuits.record_response(step.url)
            raise
        self.circuits.record_response(step.url)
        return made

    async def _encode_at_service(
        self, url: str, timeout_s: float, medium: MediaPayload, model: str, cache_salt: str | None
    ) -> EmbeddingRef:
        store = self._stores[url]
        # The second attempt requests the bytes in the response. The entry may have been evicted from the
        # store.
        for source in [store, None] if store is not None else [None]:
            response = await endpoints.send_request(
                self._http,
                "POST",
                f"{url}/v1/encode",
                timeout_s,
                data=endpoints.form_fields(model, cache_salt, timeout_s, inline=source is None),
                files={medium.modality: (medium.name, medium.data)},
            )
            # The store responds in microseconds and the read has its own deadline, so no thread is needed.
            ref = retry.parse_embedding(response, source)
            if ref is not None:
                return ref
        raise EncoderUnavailable(f"{url} sent a response without the data", reason="encoder_bad_response")


def _headers(options: EncoderClientOptions) -> dict[str, str]:
    api_key = options.get("api_key")
    optional = {
        "authorization": None if api_key is None else f"Bearer {api_key}",
        APP_HEADER: options.get("app"),
        CLASS_HEADER: options.get("service_class"),
        messages.DECODING_HEADER: options.get("decoding"),
    }
    headers = {"accept": engine_seal.EMBEDDING_MEDIA_TYPE, "accept-encoding": "identity"}
    return headers | {name: value for name, value in optional.items() if value is not None}


def _unavailable(url: str, e: Exception) -> EncoderUnavailable:
    late = isinstance(e, TimeoutError | httpx.TimeoutException) and not isinstance(e, httpx.ConnectTimeout)
    return EncoderUnavailable(
        f"no response from {url} in time" if late
        else f"no encoder service at {url}: {e!r}; start a service with: cornplug encoder --model ...",
        reason="encoder_timeout" if late else "encoder_down",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPayload:
    """One media item, ready to be sent as a file."""

    modality: Modality
    name: str
    data: bytes = field(repr=False)
    content: bytes
    """Digest by which services are ranked. It is not sent. It is the SHA-256 of the bytes. For a PIL image,
    it is the digest of the pixels, because a PNG's bytes depend on the encoder."""

    @classmethod
    def from_item(cls, item: Item) -> Self:
        """Create the payload for an item. Reads a path, and encodes a PIL image losslessly as PNG.

        Raises MediaError with one of these reasons. "not_found": a path cannot be read. "unprocessable": a
        PIL image is corrupt, has a mode that PNG lacks, or is passed as video or audio. "bad_input": the item
        has another type, or does not have exactly one of the three keys.
        """
        modality: Modality
        medium: MediaInput
        if not isinstance(item, Mapping):
            modality, medium = "image", item
        else:
            if len(item) != 1:
                raise MediaError(
                    f'an item needs one of "image", "video" and "audio", not {list(item) or "none"}',
                    reason="bad_input",
                )
            ((modality, medium),) = item.items()
        if isinstance(medium, Image.Image):
            return cls._from_image(modality, medium)
        if isinstance(medium, bytes):
            name, data = str(modality), medium
        elif isinstance(medium, str | os.PathLike):
            try:
                path = Path(os.fsdecode(medium))
                name, data = path.name, path.read_bytes()
            except (OSError, ValueError) as e:  # ValueError for a null byte in the path
                problem = (isinstance(e, OSError) and e.strerror) or e
                raise MediaError(f"cannot read {medium!r}: {problem}", reason="not_found") from e
        else:
            raise MediaError(
                f"a medium is a path, bytes or a PIL image, not {type(medium).__name__}", reason="bad_input"
            )
        return cls(modality=modality, name=name, data=data, content=hashlib.sha256(data).digest())

    @classmethod
    def _from_image(cls, modality: Modality, image: Image.Image) -> Self:
        if modality != "image":
            raise MediaError(f"{modality}: send a path or the bytes of a file", reason="unprocessable")
        out = io.BytesIO()
        try:
            image.save(out, "PNG", compress_level=1)
            content = pixels_digest(image.mode, image.width, image.height, image.tobytes())
        except MemoryError:
            raise
        except Exception as e:
            raise MediaError(
                f"cannot encode the image as PNG; convert it to RGB first: {e}", reason="unprocessable"
            ) from e
        return cls(modality=modality, name="image.png", data=out.getvalue(), content=content)
