"""Client that engines use for services on other hosts. One thread sends sealed (encrypted) HTTP requests.
Does not need torch.

    submit ──> [thread: asyncio] ──> ranking by key ──> first service that is up ──> sealed POST
    future <── reply, or the last error <── next service <──┘ down, late, full

As with `SocketEncoder`, `submit` never blocks, and the future is done by the request's deadline. A service
that failed is skipped until it replies to a DescribeRequest. The thread sends a DescribeRequest after a
backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, cast

import httpx
import msgspec

from cornplug.encoder_service.client import endpoints
from cornplug.encoder_service.client.retry import HttpResponse
from cornplug.encoder_service.client.unix_client import BACKOFF_S, MAX_OUTBOX_BYTES, THREAD_MARGIN_S
from cornplug.encoder_service.formats.engine_seal import ENGINE_PATH, MEDIA_TYPE, EngineSeal, InvalidSeal
from cornplug.encoder_service.formats.messages import (
    FETCH_REASONS,
    DescribeReply,
    DescribeRequest,
    EncodeRefusal,
    EncodeReply,
    EncodeRequest,
    HttpReply,
    HttpRequest,
    MediaRefusal,
    MediaReply,
    MediaRequest,
    ServedModel,
    is_media_refusal,
)
from cornplug.errors import EncoderError, EncoderRefused, EncoderUnavailable
from cornplug.host import tls_context

_Reply = EncodeReply | DescribeReply | MediaReply
_ReplyFuture = Future[_Reply]
_REPLY_TYPES: Final[Mapping[type[HttpRequest], type[_Reply]]] = {
    EncodeRequest: EncodeReply,
    DescribeRequest: DescribeReply,
    MediaRequest: MediaReply,
}
_PROBE_S: Final = 2.0
_SKIP_S: Final = 0.5
_MAX_SKIP_S: Final = 5.0
"""Maximum seconds for which an overloaded service is skipped, even if the service requests a longer pause.
Another attempt costs little."""
_TIMEOUT_FRACTION: Final = 0.9
"""Deadline in a MediaRequest, as a fraction of this client's timeout for the service."""
_KEEPALIVE_S: Final = 2.0
"""Seconds for which an idle connection is kept. Shorter than uvicorn's 5 s, because a connection that the
service closes first would look like a crash."""
log = logging.getLogger(__name__)


class _Detail(msgspec.Struct):
    message: str = ""
    retry_after_s: float | None = None


class _ErrorBody(msgspec.Struct):
    error: _Detail


def down_error(url: str, why: Exception) -> EncoderUnavailable:
    """Return the error for a service that cannot be reached, or that has closed the connection."""
    return EncoderUnavailable(
        f"no service responds at {url} ({str(why) or type(why).__name__}); start a service there with: "
        "cornplug encoder --model ... --host ADDRESS",
        reason="encoder_down",
    )


def error_of_response(url: str, response: HttpResponse) -> EncoderError:
    """Return the error for a response that is not sealed.

    An attacker who forges a response can only make the engine run its own tower.
    """
    said, retry_after_s = "", None
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        detail = msgspec.json.decode(response.body, type=_ErrorBody).error
        said, retry_after_s = detail.message, detail.retry_after_s
    text = f"{url}: status {response.status}" + (f": {said[:300]}" if said else "")
    match response.status:
        case 401 | 403 | 421:
            return EncoderUnavailable(text, reason="encoder_untrusted")
        case 404 | 405 | 415:
            return EncoderUnavailable(
                f"{text}; the service does not accept engines over HTTP; install this release and "
                "cornplug[remote] there",
                reason="encoder_version",
            )
        case 413:
            return EncoderRefused(f"{text} (encoder.max_body_bytes)", reason="bad_input")
        case 429 | 503:
            return EncoderRefused(text, reason="overloaded", retry_after_s=retry_after_s)
        case 408 | 504:
            return EncoderUnavailable(text, reason="encoder_timeout")
        case 500 | 502:
            return EncoderRefused(text, reason="internal")
    return EncoderUnavailable(text, reason="encoder_bad_response")


def copy_error(error: EncoderError | None) -> EncoderError:
    """Return a copy of the error for one caller, or an "encoder_down" error for None. An exception object
    that is raised several times accumulates tracebacks."""
    if isinstance(error, EncoderRefused):
        return EncoderRefused(str(error), reason=error.reason, retry_after_s=error.retry_after_s)
    return EncoderUnavailable(str(error), reason="encoder_down" if error is None else error.reason)


@dataclass(slots=True, eq=False)
class _ServiceState:
    """State of one service. Only the client's thread writes it. Other threads read only `error` and
    `is_verified`."""

    url: str
    error: EncoderError | None = None
    """Reason why the service is skipped, or None while it is used."""
    is_verified: bool = False
    in_use_since: float = -math.inf
    """Time since which the service is in use, on the monotonic clock."""
    pause_s: float = 0.0
    failure: asyncio.Event = field(default_factory=asyncio.Event)


class RemoteEncoder:
    """Client for the HTTP ports of one or several services. Thread-safe. Call `close`, or use it in `with`.

    Futures fail with EncoderRefused (the service's reason) or with EncoderUnavailable. The reasons of
    EncoderUnavailable are "encoder_down", "encoder_timeout", "encoder_bad_response", "encoder_version", and
    "encoder_untrusted" if the responding server does not have `secret`. Futures fail immediately while all
    services are skipped.
    """

    def __init__(self, urls: Sequence[str] | Mapping[str, float], secret: bytes) -> None:
        self._secret = secret
        self._weights = endpoints.parse_services(urls)
        self._services = {url: _ServiceState(url) for url in self._weights}
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._closed = False
        self._decode = msgspec.msgpack.Decoder(HttpReply).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="cornplug-encoder", daemon=True)
        self._thread.start()

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        """Send one request. Returns immediately."""
        size = sum(len(tensor.data) for tensor in request.inputs.values())
        order = endpoints.rank_services(request.key, self._weights)
        # For an EncodeRequest, `_send_in_order` returns only an EncodeReply.
        return cast("Future[EncodeReply]", self._enqueue(request, order, request.deadline_s, size))

    def submit_media(self, request: MediaRequest) -> Future[MediaReply]:
        """Send one media item, or its URL, for a service to decode and encode. Returns immediately.

        The future fails with the same errors as for `submit`. It also fails with EncoderRefused if no service
        would accept the item. `messages.is_media_refusal` is true for the reason in this case.
        """
        named = hashlib.sha256(request.data or request.url.encode()).digest()
        order = endpoints.rank_services(named, self._weights)
        size = len(request.data) + len(request.url)
        return cast("Future[MediaReply]", self._enqueue(request, order, request.deadline_s, size))

    def describe(self, deadline_s: float) -> tuple[ServedModel, ...]:
        """Return the models of the first service that responds. Waits up to `deadline_s`.

        Raises EncoderError.
        """
        future = self._enqueue(DescribeRequest(), list(self._services), deadline_s, 0)
        return cast(DescribeReply, future.result(deadline_s + THREAD_MARGIN_S)).models

    @property
    def connected(self) -> bool:
        """Whether at least one service has proved that it has the secret and has not failed since then."""
        return any(service.is_verified and service.error is None for service in self._services.values())

    @property
    def refusal(self) -> EncoderError | None:
        """Error with which a request would fail immediately, or None if the request would be sent."""
        if self._closed:
            return EncoderUnavailable("this client was closed", reason="encoder_down")
        if self._pending_bytes > MAX_OUTBOX_BYTES:
            return EncoderUnavailable("the encoder services respond too slowly", reason="encoder_timeout")
        errors = [service.error for service in self._services.values()]
        return None if None in errors else copy_error(errors[0])

    def close(self) -> None:
        """Fail pending requests with "encoder_down" and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=THREAD_MARGIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _enqueue(
        self, request: HttpRequest, order: Sequence[str], deadline_s: float, size: int
    ) -> _ReplyFuture:
        future: _ReplyFuture = Future()
        # Mark the future as running. Otherwise a caller could cancel it while the thread sets its result.
        future.set_running_or_notify_cancel()
        end = time.monotonic() + deadline_s
        with self._lock:
            problem = self.refusal if size or self._closed else None
            if problem is None:
                self._pending_bytes += size
                self._loop.call_soon_threadsafe(self._start_request, request, order, end, size, future)
        if problem is not None:
            future.set_exception(problem)
        return future

    # -- on the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        headers = {"accept-encoding": "identity", "content-type": MEDIA_TYPE}
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, verify=tls_context(), follow_redirects=False, trust_env=False
        )
        for service in self._services.values():
            self._track_task(self._loop.create_task(self._probe_service(service)))
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(self._http.aclose())
        self._loop.close()

    def _track_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_request(
        self, request: HttpRequest, order: Sequence[str], end: float, size: int, future: _ReplyFuture
    ) -> None:
        task = self._loop.create_task(
            self._send_in_order(request, [self._services[url] for url in order], end)
        )
        # The callback also runs for a task that `close` cancels before its first step.
        task.add_done_callback(partial(self._on_request_done, size, future))
        self._track_task(task)

    def _on_request_done(self, size: int, future: _ReplyFuture, task: asyncio.Task[_Reply]) -> None:
        with self._lock:
            self._pending_bytes -= size
        error: BaseException | None = EncoderUnavailable("this client was closed", reason="encoder_down")
        if not task.cancelled():
            error = task.exception()
        if error is None:
            future.set_result(task.result())
            return
        if not isinstance(error, EncoderError):
            log.error("requesting an embedding failed", exc_info=error)
            error = EncoderUnavailable(f"the client failed: {error}", reason="encoder_bad_response")
        future.set_exception(error)

    async def _send_in_order(
        self, request: HttpRequest, order: Sequence[_ServiceState], end: float
    ) -> _Reply:
        """Return the first reply of a service. Raises the last EncoderError if no service replies."""
        last: EncoderError = EncoderUnavailable("no time left for a request", reason="encoder_timeout")
        asked = [s for s in order if s.error is None or isinstance(request, DescribeRequest)]
        if not asked and order[0].error is not None:
            raise copy_error(order[0].error)
        for number, service in enumerate(asked):
            sent = time.monotonic()
            left_s = end - sent
            if left_s <= 0:
                break
            spare = any(other.error is None for other in asked[number + 1 :])
            try:
                timeout_s = left_s / 2 if spare else left_s
                if isinstance(request, MediaRequest):
                    # Use a shorter deadline, so that the service refuses a late request before this client
                    # stops waiting.
                    request = msgspec.structs.replace(request, deadline_s=_TIMEOUT_FRACTION * timeout_s)
                return await self._send_sealed(service.url, request, timeout_s)
            except EncoderRefused as e:
                last = e
                if e.reason in FETCH_REASONS:
                    continue
                if is_media_refusal(e.reason):
                    raise
                if e.reason == "overloaded":
                    pause_s = _SKIP_S if e.retry_after_s is None else e.retry_after_s
                    self._skip_service(service, e, sent, min(pause_s, _MAX_SKIP_S))
            except EncoderUnavailable as e:
                last = e
                self._skip_service(service, e, sent, _SKIP_S)
        raise last

    def _skip_service(self, service: _ServiceState, error: EncoderError, sent: float, pause_s: float) -> None:
        # Concurrent requests fail together. Ignore failed requests that were sent before the service
        # recovered.
        if sent >= service.in_use_since and service.error is None:
            service.error, service.pause_s = error, pause_s
            service.failure.set()

    async def _probe_service(self, service: _ServiceState) -> None:
        attempt = 0
        while True:
            try:
                await self._send_sealed(service.url, DescribeRequest(), _PROBE_S)
            except EncoderError as e:
                service.error, service.is_verified = e, False
                await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            service.failure.clear()
            service.error, service.is_verified, service.in_use_since = None, True, time.monotonic()
            await service.failure.wait()
            await asyncio.sleep(service.pause_s)

    async def _send_sealed(self, url: str, request: HttpRequest, timeout_s: float) -> _Reply:
        """Send a request to one service and return its reply. Raises EncoderError."""
        seal = EngineSeal.new(self._secret)
        try:
            async with asyncio.timeout(timeout_s):
                body = seal.seal_request(self._encode(request))
                headers = {"authorization": seal.authorization}
                response = await endpoints.send_request(
                    self._http, "POST", url + ENGINE_PATH, timeout_s, content=body, headers=headers
                )
        except httpx.ConnectTimeout as e:
            raise down_error(url, e) from e
        except (TimeoutError, httpx.TimeoutException) as e:
            raise EncoderUnavailable(f"no reply from {url} in time", reason="encoder_timeout") from e
        except httpx.HTTPError as e:
            raise down_error(url, e) from e
        if response.status != 200:
            raise error_of_response(url, response)
        try:
            reply = self._decode(seal.open_reply(response.body))
        except InvalidSeal as e:
            raise EncoderUnavailable(f"{url}: the reply is {e}", reason="encoder_untrusted") from e
        except (msgspec.MsgspecError, RecursionError) as e:
            raise EncoderUnavailable(f"{url}: invalid message: {e}", reason="encoder_bad_response") from e
        if isinstance(reply, EncodeRefusal | MediaRefusal):
            # The engine's client sees errors about its media item. The URL is irrelevant for these errors.
            said = reply.message if is_media_refusal(reply.reason) else f"{url}: {reply.message}"
            raise EncoderRefused(said, reason=reply.reason, retry_after_s=reply.retry_after_s)
        if not isinstance(reply, _REPLY_TYPES[type(request)]):
            raise EncoderUnavailable(f"{url} sent a reply of another type", reason="encoder_bad_response")
        return reply
