"""Blocking HTTP client of the encoder service, for applications. It does not need torch.

from cornplug import EncoderClient
ref = EncoderClient().encode("photo.jpg", model="llava-hf/llava-1.5-7b-hf")
ref.shape, ref.numpy(), ref.tensor()
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from cornplug.encoder_service.client.async_client import (
    CONCURRENCY,
    AsyncEncoderClient,
    EncoderClientOptions,
    Item,
    MediaInput,
    Result,
    Services,
)
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.errors import CornplugError, EncoderUnavailable

__all__ = ["AsyncEncoderClient", "EmbeddingRef", "EncoderClient", "SocketEncoder"]

_CLOSE_S: Final = 5.0
T = TypeVar("T")


class EncoderClient:
    """Blocking variant of `AsyncEncoderClient`, with the same arguments, results and errors.

    Thread-safe. Call `close`, or use it in `with`. The asyncio client runs in a separate thread, so this
    client also works in a notebook. After a fork, the client cannot be used.
    """

    def __init__(self, services: Services | None = None, **options: Unpack[EncoderClientOptions]) -> None:
        self._client = AsyncEncoderClient(services, **options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cornplug-client", daemon=True)
        self._thread.start()

    def encode(
        self,
        image: MediaInput | None = None,
        *,
        model: str,
        video: MediaInput | None = None,
        audio: MediaInput | None = None,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
    ) -> EmbeddingRef:
        """Return the embedding of one media item. See `AsyncEncoderClient.encode`."""
        return self._run(
            self._client.encode(
                image, model=model, video=video, audio=audio, cache_salt=cache_salt, deadline_s=deadline_s
            )
        )

    def encode_many(
        self,
        items: Iterable[Item],
        *,
        model: str,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Iterator[Result]:
        """Yield the same results as `AsyncEncoderClient.encode_many`. Closing the iterator cancels the items
        in flight."""
        waiting = iter(enumerate(items))
        ended: queue.SimpleQueue[Future[EmbeddingRef]] = queue.SimpleQueue()
        in_flight: dict[Future[EmbeddingRef], int] = {}
        try:
            while True:
                # Iterate in the caller's thread, because the iterable may be a generator that calls this
                # client.
                for index, item in itertools.islice(waiting, concurrency - len(in_flight)):
                    future = self._submit(
                        self._client.encode_item(
                            item, model=model, cache_salt=cache_salt, deadline_s=deadline_s
                        )
                    )
                    in_flight[future] = index
                    future.add_done_callback(ended.put)
                if not in_flight:
                    return
                # The wait is bounded, because each item ends by its deadline.
                future = ended.get()
                index = in_flight.pop(future)
                result: EmbeddingRef | CornplugError
                try:
                    result = _wait_result(future)
                except CornplugError as e:
                    result = e
                yield index, result
        finally:
            for future in in_flight:
                future.cancel()

    def models(self) -> list[dict[str, Any]]:
        """Return the served models. See `AsyncEncoderClient.models`."""
        return self._run(self._client.models())

    def close(self) -> None:
        """Close the client. Calls in progress on other threads fail with "closed", and so do later calls."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()
        self._loop.stop()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's thread and return its result. `work` must have its own deadline."""
        future = self._submit(work)
        try:
            return _wait_result(future)
        finally:
            # Cancel the work after a KeyboardInterrupt. This has no effect if the work is done.
            future.cancel()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed or self._pid != os.getpid():
                work.close()
                raise EncoderUnavailable(
                    "this client was closed, or created before a fork; create a new client", reason="closed"
                )
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def _wait_result(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError:
        raise EncoderUnavailable("this client was closed", reason="closed") from None
