"""ASGI middleware that refuses requests: access checks, and refusal of new requests while the service stops.

The outermost middleware checks the key, Host, Origin and content type:

key      If `encoder.require_key` is set, all paths except /health and /ready require a key.
engine   /v1/engine requires a proof of the secret instead of a key. The proof is checked before the body is
         read.
Host     A request without a key must name this service, which prevents DNS rebinding.
Origin   A POST request must come from a program or from this service's page, not from a page of another site.
content  A POST request must contain JSON, except for forms at /v1/encode and sealed bytes at /v1/engine. A
         page of another site cannot send JSON or such bytes without CORS.

`DrainMiddleware` counts the HTTP requests in flight, so that they can finish before the service stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cornplug.config import EncoderConfig
from cornplug.encoder_service.access import AuditLog
from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.engine_seal import SealChecker
from cornplug.encoder_service.http.responses import HttpRefusal, refusal_response
from cornplug.errors import EncoderRefused
from cornplug.qos import QosClasses, ServiceClass

SEAL_SCOPE_KEY: Final = "cornplug.engine_seal"
"""Key in the ASGI scope for the seal of an engine's request, after its proof has been checked."""
ENGINE_CLASS: Final = ServiceClass(name="/v1/engine")
"""Class of a request to /v1/engine before its sealed body, which contains the app, is opened."""
OPEN_PATHS: Final = ("/health", "/ready")
_READ_METHODS: Final = ("GET", "HEAD", "OPTIONS")
_FORM_PATH: Final = "/v1/encode"
DRAINING_REFUSAL: Final = HttpRefusal(
    reason="draining", message="the service is stopping; use another service", retry_after_s=1.0
)


async def require_json(request: Request) -> None:
    """Reject a POST request unless its body is JSON or has another content type that the route accepts.

    Without a CORS preflight, browsers let pages of other sites send some content types, such as text/plain.
    Raises EncoderRefused("media_type").
    """
    if request.method in _READ_METHODS:
        return
    forms = request.url.path == _FORM_PATH
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.url.path == engine_seal.ENGINE_PATH and kind == engine_seal.MEDIA_TYPE:
        return
    if kind != "application/json" and not (forms and kind == "multipart/form-data"):
        also = "multipart/form-data or " if forms else ""
        raise EncoderRefused(
            f"content-type: {kind[:200]!r} is not supported; send {also}application/json", reason="media_type"
        )


class AccessControlMiddleware:
    """Middleware that checks access. It replies to refused requests with JSON, and counts and audits them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: EncoderConfig,
        classes: QosClasses,
        audit: AuditLog,
        engines: SealChecker,
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app = app
        self._classes = classes
        self._audit = audit
        self._count_refusal = count
        self._seal_checker = engines
        self._admin_key = config.admin_key.get_secret_value()
        self._require_key = config.require_key
        said = (name.strip() for name in config.names.split(","))
        self._names = {"localhost", socket.gethostname(), config.host, *said} - {""}
        self._names = {name.lower().strip("[]").rstrip(".") for name in self._names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        if scope["path"] == engine_seal.ENGINE_PATH:
            refusal = self._check_engine(scope, request.headers)
        else:
            refusal = self._check_request(scope["method"], request.headers)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._count_refusal(refusal.reason)
        self._audit.log_refusal(request, refusal.reason)
        response = refusal_response(HttpRefusal.from_error(refusal))
        if refusal.reason == "unauthorized":
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _check_engine(self, scope: Scope, headers: Headers) -> EncoderRefused | None:
        try:
            scope[SEAL_SCOPE_KEY] = self._seal_checker.check(headers.get("authorization", ""))
        except EncoderRefused as e:
            return e
        return None

    def _check_request(self, method: str, headers: Headers) -> EncoderRefused | None:
        if not self._has_key(headers):
            if self._require_key:
                return EncoderRefused(
                    "authorization: a key is required; send 'Bearer KEY'", reason="unauthorized"
                )
            if (host := self._find_foreign_host(headers)) is not None:
                return EncoderRefused(
                    f"host: {host[:200]!r} is not a name of this service; add it to encoder.names (--names), "
                    "or send a key",
                    reason="forbidden_host",
                )
        if method in _READ_METHODS:
            return None
        if _is_from_other_site(headers):
            return EncoderRefused(
                "origin: requests from pages of other sites are not allowed", reason="forbidden_origin"
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        said = headers.get("authorization", "")
        admin = bool(self._admin_key) and hmac.compare_digest(
            said.encode(), f"Bearer {self._admin_key}".encode()
        )
        return self._classes.is_known_key(said) or admin

    def _find_foreign_host(self, headers: Headers) -> str | None:
        """Return the first Host header that is not a name of this service, or None.

        A request without a Host header is accepted. It does not come from a browser, because browsers always
        send a Host header.
        """
        for said in headers.getlist("host"):
            name = _host_name(said)
            if name not in self._names and not _is_address(name):
                return said
        return None


class DrainState:
    """Counts the requests in flight. Use it from one event loop. Requests and streams that started before
    `close` may finish."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @contextlib.contextmanager
    def track_request(self) -> Iterator[None]:
        """Count one request as in flight. The context must last until the last byte of the reply has been
        sent."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closed = True

    async def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no request is in flight. Returns False if the deadline passes first."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except TimeoutError:
            return False
        return True


class DrainMiddleware:
    """ASGI middleware that counts POST requests in flight. After `close`, it refuses new POST requests.

    Paths that end with one of the `exempt_suffixes` are never refused, because requests in flight depend on
    them.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: DrainState,
        exempt_suffixes: tuple[str, ...] = (),
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app = app
        self._count_refusal = count
        self._state = gate
        self._exempt_suffixes = exempt_suffixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"].endswith(self._exempt_suffixes)
        ):
            await self._app(scope, receive, send)
        elif self._state.is_closed:
            self._count_refusal(DRAINING_REFUSAL.reason)
            await refusal_response(DRAINING_REFUSAL)(scope, receive, send)
        else:
            with self._state.track_request():
                await self._app(scope, receive, send)


def _is_from_other_site(headers: Headers) -> bool:
    """Return whether a browser sent the request on behalf of a page of another site."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def _host_name(host: str) -> str:
    """Return the name in a Host header in lower case, without port, brackets and trailing dot."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
