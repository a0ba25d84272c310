"""Many media: one request to each service, then the unanswered media one by one.

batch of items ──by first service──> one request of several ──part──> result
                                               └─ refused for now, lost, late ─> one by one,
                                                  with retries and fail-over, in the time left
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self

import httpx
from PIL import Image

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.client import responses
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.client.responses import HttpAnswer, RemoteFailure, RetryLater
from cornplug.encoder_service.client.retry import CircuitBreakers
from cornplug.errors import CornplugError, EncoderError, EncoderRefused, EncoderUnavailable, MediaError
from cornplug.identity import pixels_digest

Medium = str | Path | bytes | Image.Image
"""A path, the bytes of a file, or a PIL image."""
Item = Medium | Mapping[Modality, Medium]
"""An image, or {"image" | "video" | "audio": medium}."""
ITEMS: Final = 16
BYTES: Final = 16 << 20
"""Maximum bytes of media in one request. A service accepts 64 items and 64 MiB."""
_TOO_MUCH: Final = frozenset({"too_large", "too_many_items"})
"""Reasons that concern a request, not its items."""
Result = tuple[int, EmbeddingRef | CornplugError]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPayload:
    """One medium, ready to be sent as a file."""

    modality: Modality
    name: str
    data: bytes = field(repr=False)
    content: bytes
    """SHA-256 of the bytes, or the digest of the pixels of a PIL image, because a PNG's bytes depend on
    the encoder. It ranks the services and is not sent."""

    @classmethod
    def of(cls, item: Item) -> Self:
        """Return the payload of an item. A path is read, and a PIL image is encoded as PNG without loss.

        Raises MediaError: "not_found" for a path that cannot be read, "unprocessable" for a PIL image in a
        mode that PNG lacks or as a video or audio, "bad_input" for an item without exactly one medium.
        """
        modality: Modality
        medium: Medium
        if not isinstance(item, Mapping):
            modality, medium = "image", item
        else:
            if len(item) != 1:
                raise MediaError(
                    f'an item needs one of "image", "video" and "audio", this has {sorted(item) or "none"}',
                    reason="bad_input",
                )
            ((modality, medium),) = item.items()
        if isinstance(medium, Image.Image):
            return cls._packed(modality, medium)
        if isinstance(medium, bytes):
            name, data = str(modality), medium
        else:
            try:
                name, data = Path(medium).name, Path(medium).read_bytes()
            except OSError as e:
                raise MediaError(f"cannot read {medium}: {e.strerror}", reason="not_found") from e
        return cls(modality=modality, name=name, data=data, content=hashlib.sha256(data).digest())

    @classmethod
    def _packed(cls, modality: Modality, image: Image.Image) -> Self:
        if modality != "image":
            raise MediaError(f"{modality}: send a path or the bytes of a file", reason="unprocessable")
        out = io.BytesIO()
        try:
            image.save(out, "PNG", compress_level=1)
        except OSError as e:
            raise MediaError(
                f"cannot encode the image as PNG; convert it to RGB first: {e}", reason="unprocessable"
            ) from e
        content = pixels_digest(image.mode, image.width, image.height, image.tobytes())
        return cls(modality=modality, name="image.png", data=out.getvalue(), content=content)


class ItemSender(Protocol):
    """Interface of the client: sends media and reads responses."""

    circuits: CircuitBreakers

    def first(self, medium: MediaPayload) -> str:
        """Return the preferred service for a medium."""
        ...

    async def single(
        self, medium: MediaPayload, *, model: str, cache_salt: str | None, deadline_s: float
    ) -> EmbeddingRef:
        """Return the embedding of one medium, with retries and failover."""
        ...

    def stream(
        self, url: str, media: Sequence[MediaPayload], *, model: str, cache_salt: str | None, timeout_s: float
    ) -> AsyncGenerator[tuple[int, HttpAnswer], None]:
        """Yield (position, response) of each medium, as they arrive."""
        ...

    def embedding(self, url: str, answer: HttpAnswer) -> EmbeddingRef | None:
        """Return the embedding, or None if it is in neither the response nor the store."""
        ...


class EncodeManyBatch:
    """Items of one `encode_many` that are sent together. `put` gets each result once, as it arrives."""

    def __init__(
        self,
        sender: ItemSender,
        put: Callable[[Result], None],
        *,
        model: str,
        cache_salt: str | None,
        deadline_s: float,
    ) -> None:
        self._sender = sender
        self._put = put
        self._model = model
        self._cache_salt = cache_salt
        self._end = time.monotonic() + deadline_s
        self._left: set[int] = set()

    async def run(self, entries: Sequence[tuple[int, Item]]) -> None:
        """Send the items. Ends by the deadline, and always returns one result for each item."""
        self._left = {index for index, _ in entries}
        try:
            made = await asyncio.gather(*(self._outgoing(index, item) for index, item in entries))
            media = {index: medium for index, medium in made if medium is not None}
            await asyncio.gather(*(self._batch(url, batch) for url, batch in self._batches(media)))
        finally:
            for index in list(self._left):
                self._settle(index, EncoderUnavailable("given up", reason="closed"))

    async def _outgoing(self, index: int, item: Item) -> tuple[int, MediaPayload | None]:
        try:
            return index, await asyncio.to_thread(MediaPayload.of, item)
        except CornplugError as e:
            self._settle(index, e)
            return index, None

    def _batches(self, media: Mapping[int, MediaPayload]) -> list[tuple[str, dict[int, MediaPayload]]]:
        made: list[tuple[str, dict[int, MediaPayload]]] = []
        open_of: dict[str, dict[int, MediaPayload]] = {}
        for index, medium in media.items():
            url = self._sender.first(medium)
            batch = open_of.get(url)
            size = sum(len(other.data) for other in batch.values()) if batch else 0
            if batch is None or len(batch) >= ITEMS or size + len(medium.data) > BYTES:
                batch = open_of[url] = {}
                made.append((url, batch))
            batch[index] = medium
        return made

    async def _batch(self, url: str, batch: Mapping[int, MediaPayload]) -> None:
        sent = time.monotonic()
        if len(batch) > 1 and self._sender.circuits.take(url, sent):
            await self._together(url, batch, sent)
        rest = [index for index in batch if index in self._left]
        await asyncio.gather(*(self._alone(index, batch[index]) for index in rest))

    async def _together(self, url: str, batch: Mapping[int, MediaPayload], sent: float) -> None:
        circuits = self._sender.circuits
        indices = list(batch)
        timeout_s = (self._end - sent) / 2
        try:
            async with asyncio.timeout(timeout_s):
                stream = self._sender.stream(
                    url,
                    list(batch.values()),
                    model=self._model,
                    cache_salt=self._cache_salt,
                    timeout_s=timeout_s,
                )
                async with contextlib.aclosing(stream):
                    async for position, answer in stream:
                        self._read(url, indices[position], answer)
        except RetryLater as busy:
            circuits.refused(url, time.monotonic(), busy.retry_after_s)
        except (EncoderUnavailable, httpx.HTTPError, TimeoutError, IndexError):
            circuits.failed(url, time.monotonic(), sent=sent)
        except EncoderRefused as e:
            circuits.answered(url)
            if e.reason not in _TOO_MUCH:
                for index in indices:
                    self._settle(index, e)
        except RemoteFailure:
            circuits.answered(url)
        else:
            circuits.answered(url)

    def _read(self, url: str, index: int, answer: HttpAnswer) -> None:
        """Record the result if it is an embedding or a final refusal. Other items are retried."""
        try:
            ref = self._sender.embedding(url, answer)
        except EncoderRefused as e:
            self._settle(index, e)
        except RetryLater as busy:
            self._sender.circuits.refused(url, time.monotonic(), busy.retry_after_s)
        except RemoteFailure:
            return
        else:
            if ref is not None:
                self._settle(index, ref)

    async def _alone(self, index: int, medium: MediaPayload) -> None:
        left = max(self._end - time.monotonic(), 0.001)
        try:
            found = await self._sender.single(
                medium, model=self._model, cache_salt=self._cache_salt, deadline_s=left
            )
        except EncoderError as e:
            self._settle(index, e)
        else:
            self._settle(index, found)

    def _settle(self, index: int, result: EmbeddingRef | CornplugError) -> None:
        if index in self._left:
            self._left.discard(index)
            self._put((index, result))


def part_answer(url: str, head: Mapping[str, str], body: bytes) -> tuple[int, HttpAnswer]:
    """Return a part of a streamed response as (position, the response to a request for its medium alone)."""
    position = head.get("x-cornplug-index", "")
    if not position.isdigit():
        raise EncoderUnavailable(f"{url}: a part has no index", reason="encoder_bad_response")
    status = 200 if "x-cornplug-key" in head else responses.status_in(body)
    return int(position), HttpAnswer(url=url, status=status, headers=dict(head), body=body)
