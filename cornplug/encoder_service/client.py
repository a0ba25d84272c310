"""Clients of the encoder service, torch-free: apps by HTTP, engines by socket.

from cornplug import EncoderClient
ref = EncoderClient().encode("photo.jpg", model="llava-hf/llava-1.5-7b-hf")
ref.shape, ref.numpy(), ref.tensor()
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
from PIL import Image

from cornplug.config import Config, load
from cornplug.encoder_service.reference import EmbeddingRef, leased
from cornplug.encoder_service.socket_client import SocketEncoder
from cornplug.errors import EncoderRefused, EncoderUnavailable, MediaError
from cornplug.store.base import Store
from cornplug.store.pool import PoolStore

__all__ = ["AsyncEncoderClient", "EmbeddingRef", "EncoderClient", "SocketEncoder"]

Picture = str | Path | bytes | Image.Image
RAW: Final = "application/octet-stream"
_MARGIN_S: Final = 0.5
"""What a client waits beyond the deadline that it gave the service, for the way back."""


class EncoderClient:
    """Embeddings of pictures, over HTTP. Thread-safe; `close` it, or use it in `with`.

    Args:
        url: the service; None: where the configuration says (`encoder.host`, `encoder.port`).
        store: read embeddings from here, without a copy, where the service has put them.
            None: the host's store if one answers, but only for a service found by configuration.
        deadline_s: longest wait for one answer; None: `encoder.deadline_s`.
        transport: how to reach the service, for tests and proxies (httpx's own seam).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        store: Store | None = None,
        deadline_s: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        config = load()
        self._deadline_s = deadline_s or config.encoder.deadline_s
        self._own_store = None if store is not None or url is not None else _local_store(config)
        self._store = store or self._own_store
        self._http = httpx.Client(base_url=url or _url(config), transport=transport)

    def encode(self, image: Picture, *, model: str, salt: str | None = None) -> EmbeddingRef:
        """The embedding of a picture: a path, the bytes of a file, or a PIL image.

        Raises EncoderUnavailable ("encoder_down", "encoder_timeout", "encoder_garbage"),
        EncoderRefused (the service's reason and message), MediaError("not_found").
        """
        name, data = picture_bytes(image)
        end = time.monotonic() + self._deadline_s
        ref = None
        if self._store is not None:
            response = self._post(_form(model, salt, self._deadline_s, inline=False), name, data, end)
            ref = _read(response, self._store)
        if ref is None:
            # No store, or the entry was gone before we came: the bytes travel in the answer.
            response = self._post(_form(model, salt, self._deadline_s, inline=True), name, data, end)
            ref = _read(response, None)
        if ref is None:
            raise EncoderUnavailable("the service answered without the data", reason="encoder_garbage")
        return ref

    def models(self) -> list[dict[str, Any]]:
        """What is served: name, family, identity and fingerprints (hex), dtype, hidden_size."""
        try:
            return _models(self._http.get("/v1/models", timeout=self._deadline_s))
        except httpx.HTTPError as e:
            raise _unavailable(e) from e

    def close(self) -> None:
        """End the connections. References that were read from the store stay valid."""
        self._http.close()
        # The host's store is left open: references hold leases that end with its connection.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, form: Mapping[str, str], name: str, data: bytes, end: float) -> httpx.Response:
        try:
            return self._http.post(
                "/v1/encode",
                data=form,
                files={"image": (name, data)},
                headers={"accept": RAW},
                timeout=_left(end),
            )
        except httpx.HTTPError as e:
            raise _unavailable(e) from e


class AsyncEncoderClient:
    """`EncoderClient` for asyncio; the same arguments, answers and errors."""

    def __init__(
        self,
        url: str | None = None,
        *,
        store: Store | None = None,
        deadline_s: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        config = load()
        self._deadline_s = deadline_s or config.encoder.deadline_s
        self._store = store or (None if url is not None else _local_store(config))
        self._http = httpx.AsyncClient(base_url=url or _url(config), transport=transport)

    async def encode(self, image: Picture, *, model: str, salt: str | None = None) -> EmbeddingRef:
        """As `EncoderClient.encode`."""
        name, data = picture_bytes(image)
        end = time.monotonic() + self._deadline_s
        ref = None
        if self._store is not None:
            response = await self._post(_form(model, salt, self._deadline_s, inline=False), name, data, end)
            # Microseconds, and bounded by the store's deadline: not worth a thread.
            ref = _read(response, self._store)
        if ref is None:
            response = await self._post(_form(model, salt, self._deadline_s, inline=True), name, data, end)
            ref = _read(response, None)
        if ref is None:
            raise EncoderUnavailable("the service answered without the data", reason="encoder_garbage")
        return ref

    async def models(self) -> list[dict[str, Any]]:
        """As `EncoderClient.models`."""
        try:
            return _models(await self._http.get("/v1/models", timeout=self._deadline_s))
        except httpx.HTTPError as e:
            raise _unavailable(e) from e

    async def close(self) -> None:
        """As `EncoderClient.close`."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _post(self, form: Mapping[str, str], name: str, data: bytes, end: float) -> httpx.Response:
        try:
            return await self._http.post(
                "/v1/encode",
                data=form,
                files={"image": (name, data)},
                headers={"accept": RAW},
                timeout=_left(end),
            )
        except httpx.HTTPError as e:
            raise _unavailable(e) from e


def picture_bytes(image: Picture) -> tuple[str, bytes]:
    """(file name, bytes) to send. A PIL image travels as PNG, which loses nothing.

    Raises MediaError("not_found") for a path that cannot be read, "unprocessable" for a PIL
    image of a mode that PNG has not.
    """
    if isinstance(image, bytes):
        return "image", image
    if isinstance(image, Image.Image):
        out = io.BytesIO()
        try:
            image.save(out, "PNG", compress_level=1)
        except OSError as e:
            raise MediaError(f"convert it to RGB first: {e}", reason="unprocessable") from e
        return "image.png", out.getvalue()
    try:
        return Path(image).name, Path(image).read_bytes()
    except OSError as e:
        raise MediaError(f"cannot read {image}: {e.strerror}", reason="not_found") from e


def _form(model: str, salt: str | None, deadline_s: float, *, inline: bool) -> dict[str, str]:
    form = {"model": model, "deadline_s": f"{deadline_s:g}", "inline": "true" if inline else "false"}
    return form if salt is None else {**form, "salt": salt}


def _read(response: httpx.Response, store: Store | None) -> EmbeddingRef | None:
    """None where the data is neither in the answer nor, any more, in the store."""
    if response.status_code != 200:
        raise _refusal(response)
    try:
        if response.headers.get("content-type", "").startswith(RAW):
            return EmbeddingRef.inline(
                key=bytes.fromhex(response.headers["x-cornplug-key"]),
                shape=tuple(int(n) for n in response.headers["x-cornplug-shape"].split(",")),
                dtype=response.headers["x-cornplug-dtype"],
                tower=response.headers["x-cornplug-tower"],
                seconds=float(response.headers["x-cornplug-seconds"]),
                data=response.content,
            )
        meta = response.json()
        if store is None:
            return None
        return leased(
            store, bytes.fromhex(meta["key"]), tower=str(meta["tower"]), seconds=float(meta["seconds"])
        )
    except (KeyError, ValueError, TypeError) as e:
        raise EncoderUnavailable(
            f"not an answer of an encoder service: {e!r}", reason="encoder_garbage"
        ) from e


def _models(response: httpx.Response) -> list[dict[str, Any]]:
    if response.status_code != 200:
        raise _refusal(response)
    try:
        return list(response.json()["models"])
    except (KeyError, ValueError, TypeError) as e:
        raise EncoderUnavailable(
            f"not an answer of an encoder service: {e!r}", reason="encoder_garbage"
        ) from e


def _refusal(response: httpx.Response) -> EncoderRefused | EncoderUnavailable:
    try:
        error = response.json()["error"]
        reason, message = str(error["reason"]), str(error["message"])
    except (KeyError, ValueError, TypeError):
        return EncoderUnavailable(
            f"HTTP {response.status_code} at {response.url}, not of an encoder service",
            reason="encoder_garbage",
        )
    return EncoderRefused(message, reason=reason)


def _unavailable(e: httpx.HTTPError) -> EncoderUnavailable:
    timeout = isinstance(e, httpx.TimeoutException)
    return EncoderUnavailable(
        f"no answer from the encoder service in time: {e!r}" if timeout
        else f"no encoder service: {e}; start one with: cornplug encoder --model ...",
        reason="encoder_timeout" if timeout else "encoder_down",
    )  # fmt: skip


def _left(end: float) -> float:
    return max(0.05, end - time.monotonic()) + _MARGIN_S


def _url(config: Config) -> str:
    host = config.encoder.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.encoder.port}"


def _local_store(config: Config) -> Store | None:
    if not config.store.socket.exists():
        return None
    return PoolStore(config.store, autostart=False)
