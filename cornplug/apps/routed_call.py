"""Routing of one request of a client: the choice of engines, and the handling of responses and failures. No
I/O.

    next_step() ──> httpx.Request: send it ──> accept_response(status, headers) ──> True: return the response
                │                          │                                  └──> False: call next_step again
                │                          └─> record_failure(error): call next_step again
                ├─> RetryPause: wait
                └─> raises the last engine's error, unchanged

    forward(chunk), then end_stream(error) ──> last bytes of the stream, or None: call next_step for the rest

A request is sent again only in three cases: its connection was refused, the engine returned status 429 or
503, or the engine was lost before the first byte of its response and a second execution is harmless. The
request fails after the loss of more than `MAX_LOSSES` engines, because the request may cause the losses.

The engines of a request class are listed in the `routes.json` of `cornplug launch`, or the caller passes
their addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from cornplug.apps.engine_choice import NO_PREFIX, EngineChooser, prompt_prefix
from cornplug.apps.stream_continuation import (
    CHAT,
    COMPLETIONS,
    EngineFailedInStream,
    StreamContinuation,
    StreamDiverged,
)
from cornplug.encoder_service.client import endpoints
from cornplug.encoder_service.client.retry import RetryPause, retry_after_s
from cornplug.errors import ConfigError
from cornplug.planner.inputs.field_types import suggest_known_name
from cornplug.private_paths import runtime_dir

_FIELD = "routes"
Addresses = Sequence[str] | Mapping[str, float]
"""URLs of engines, or a mapping of URLs to each engine's share of the requests."""
MAX_LOSSES: Final = 2
_REPEATABLE: Final = frozenset({CHAT, COMPLETIONS, "/v1/embeddings"})
"""Paths whose requests have no side effects, so that a second execution only costs time."""
_CLASS_FIELD_PATHS: Final = frozenset({CHAT, COMPLETIONS})
"""Paths whose request bodies may contain `priority` and `cache_salt`, in vLLM and SGLang."""
_BUSY: Final = frozenset({429, 503})
_REFUSED_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout)
_LOST_ERRORS: Final = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
STREAM_ERRORS: Final = (httpx.TransportError, EngineFailedInStream, StreamDiverged)
"""Errors that a transport passes to `RoutedCall.end_stream`."""
_REPLACED_HEADERS: Final = frozenset({b"host", b"content-length", b"transfer-encoding"})
_MIN_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class ClassRoute:
    """Engines for the requests of one class, and fields that are added to these requests."""

    engines: Mapping[str, float]
    """URL of each engine, without a trailing slash -> weight."""
    priority: int | None = None
    cache_salt: str | None = None


Routes = Callable[[], ClassRoute]
"""Function that returns the current route."""


def resolve_routes(
    app: str, classes: Sequence[str], source: Path | Addresses | None, request: str | None
) -> Routes:
    """Return a function that returns the current route of one request class.

    Args:
        app: Name of the application.
        classes: Names of the application's request classes.
        source: Path of `routes.json` or its folder, or addresses of engines. The default is this user's only
            launch that has the class.
        request: Name of the request class. The default is the application's only class.

    Raises ConfigError with the field `request` or `routes`.
    """
    if request is None and len(classes) != 1:
        raise ConfigError(
            "request",
            f"missing; {app} has the classes {', '.join(classes)}",
            "Set it to one of these classes.",
        )
    if request is not None and request not in classes:
        raise ConfigError(
            "request", f"{app} has no class {request!r}", suggest_known_name(request, list(classes))
        )
    name = f"{app}/{request or classes[0]}"
    if source is None:
        return RoutesFile(_find_launch(name), name).current
    if isinstance(source, Path):
        return RoutesFile(source / "routes.json" if source.is_dir() else source, name).current
    fixed = ClassRoute(_engines(source))
    return lambda: fixed


class RoutesFile:
    """Route of one class in a `routes.json`, which is read again when the file changes."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._route = self._read()

    def current(self) -> ClassRoute:
        """Return the current route, or the last valid route if the file cannot be read."""
        with self._lock:
            try:
                if self._read_stamp() != self._stamp:
                    self._route = self._read()
            except (OSError, ConfigError):
                pass
            return self._route

    def _read_stamp(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> ClassRoute:
        try:
            stamp = self._read_stamp()
            table = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, Any]])
        except (OSError, msgspec.DecodeError) as e:
            remedy = "Pass the routes.json of a launch, or addresses of engines."
            raise ConfigError(_FIELD, f"{self._path} cannot be read ({e})", remedy) from e
        if self._name not in table:
            raise ConfigError(
                _FIELD,
                f"{self._path} has no class {self._name!r}",
                suggest_known_name(self._name, list(table)),
            )
        entry = table[self._name]
        try:
            engines = {str(one["url"]): float(one["weight"]) for one in entry["to"]}
        except (KeyError, TypeError, ValueError) as e:
            remedy = "Pass a file written by `cornplug launch`."
            raise ConfigError(_FIELD, f"{self._path}: {self._name} has no addresses", remedy) from e
        self._stamp = stamp
        return ClassRoute(_engines(engines), entry.get("priority"), entry.get("cache_salt"))


def _engines(addresses: Addresses) -> Mapping[str, float]:
    try:
        return endpoints.parse_services(addresses)
    except ConfigError as e:
        raise ConfigError(_FIELD, str(e).partition(": ")[2].partition(". ")[0], e.remedy) from e


def _find_launch(name: str) -> Path:
    """Return the `routes.json` of this user's only launch that has the class."""
    found = []
    for path in sorted(runtime_dir().glob("plan-*/routes.json")):
        try:
            if name in msgspec.json.decode(path.read_bytes(), type=dict[str, Any]):
                found.append(path)
        except (OSError, msgspec.DecodeError):
            continue
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or f"none in {runtime_dir()}"
        problem = f"{len(found)} launches of this user have the class {name!r} ({listed})"
        raise ConfigError(_FIELD, problem, "Pass the run folder of one launch, or addresses of engines.")
    return found[0]


class RoutedCall:
    """State of a request in progress. The module's docstring describes the order of the calls."""

    def __init__(
        self,
        chooser: EngineChooser,
        routes: Routes,
        request: httpx.Request,
        content: bytes,
        *,
        retry_s: float,
    ) -> None:
        self._chooser = chooser
        self._routes = routes
        self._request = request
        self._content = content
        self._path = request.url.path
        self._retry_s = retry_s
        self._end = chooser.clock() + retry_s
        body = _json_object(content) if request.method == "POST" else None
        if body is not None and self._path in _CLASS_FIELD_PATHS:
            body = _add_class_fields(body, routes())
            self._content = msgspec.json.encode(body)
        self._prefix = NO_PREFIX if body is None else prompt_prefix(body)
        self._stream = None if body is None else StreamContinuation.for_request(self._path, body)
        if self._stream is not None:
            self._content = msgspec.json.encode(self._stream.next_request_body())
        self._repeatable = request.method in ("GET", "HEAD") or (
            request.method == "POST" and self._path in _REPEATABLE
        )
        self.is_buffered = self._repeatable and not (body or {}).get("stream")
        """Whether the transport reads the complete response before it returns anything to the caller."""
        self._engine: str | None = None
        self._sent_at = 0.0
        self._losses = 0
        self._forwarded = False
        self._error: Exception | None = None
        """Error of the last engine."""
        self._stream_error: Exception | None = None
        """Error that interrupted the stream. It is raised if no engine continues the stream."""
        self._given_up = False

    def next_step(self) -> httpx.Request | RetryPause:
        """Return the request to send to an engine, or a pause to wait before the next call.

        Raises the last engine's error if the request must not be sent again.
        """
        now = self._chooser.clock()
        error = self._stream_error or self._error
        if error is not None and (self._given_up or now >= self._end):
            raise error
        engines = self._routes().engines
        engine = self._chooser.choose(engines, self._prefix, now)
        if engine is None:
            opens_at = self._chooser.opens_at(engines)
            if opens_at < self._end:
                return RetryPause(max(opens_at - now, _MIN_PAUSE_S))
            if error is not None:
                raise error
            engine = self._chooser.choose_earliest(engines, self._prefix)
        self._engine, self._sent_at = engine, now
        return self._request_to(engine)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Record a transport error that occurs while the request is sent, and end only this attempt.

        Use this as a context manager around sending the request. After any other exception, such as a
        cancellation, the call is closed and the exception is raised.
        """
        try:
            yield
        except httpx.TransportError as e:
            self.record_failure(e)
        except BaseException:
            self.release_engine()
            raise

    def accept_response(self, status: int, headers: httpx.Headers) -> bool:
        """Return whether the caller gets this response. If not, close the response and call `next_step`."""
        engine, now = self._current_engine(), self._chooser.clock()
        if status in _BUSY:
            self._chooser.record_pause(engine, now, retry_after_s(headers.get("retry-after")))
            if max(now, self._chooser.opens_at(self._routes().engines)) < self._end:
                self.release_engine()
                return False
        else:
            self._chooser.record_accepted(engine, self._prefix if status == 200 else NO_PREFIX)
        is_events = status == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if self._stream_error is not None and not is_events:
            self._given_up = True
            self.release_engine()
            return False
        if not is_events or "content-encoding" in headers:
            self._stream = None
        return True

    def record_failure(self, error: httpx.TransportError) -> None:
        """Record that sending the request failed or no response arrived."""
        self._error = error
        refused = isinstance(error, _REFUSED_ERRORS)
        lost = isinstance(error, _LOST_ERRORS)
        self._report_failure(error)
        self._losses += lost
        again = refused or (lost and self._repeatable and self._losses <= MAX_LOSSES)
        self._given_up = not again
        self.release_engine()

    def forward(self, chunk: bytes) -> Iterator[bytes]:
        """Yield bytes of the response for the caller. May raise any of `STREAM_ERRORS`."""
        for out in [chunk] if self._stream is None else self._stream.forward(chunk):
            self._forwarded = True
            yield out

    def end_stream(self, error: Exception | None) -> bytes | None:
        """Return the last bytes for the caller, or None if `next_step` returns a request for the rest.

        Args:
            error: One of `STREAM_ERRORS`, or None if the engine ended its response.

        If no engine can continue, raises the error that first interrupted the stream.
        """
        stream = self._stream
        if error is not None:
            self._report_failure(error)
        self.release_engine()
        if stream is not None and (stream.done_sent or stream.finish_sent):
            return stream.finish()
        if error is None and stream is None:
            return b""
        if not isinstance(error, StreamDiverged):
            self._losses += 1
            if self._prepare_continuation(error):
                return None
        if error is None and stream is not None and self._stream_error is None:
            return stream.finish()
        final = self._stream_error or error
        assert final is not None
        raise final

    def release_engine(self) -> None:
        """Record that the engine no longer processes this call. May be called more than once."""
        if self._engine is not None:
            self._chooser.record_end(self._engine)
            self._engine = None

    def _prepare_continuation(self, error: Exception | None) -> bool:
        """Prepare the call for another engine, and return whether to send a request to that engine.

        The new request is for the rest of the stream, or for everything if nothing was forwarded.
        """
        if self._losses > MAX_LOSSES or not isinstance(
            error, (*_LOST_ERRORS, EngineFailedInStream, type(None))
        ):
            return False
        if self._stream is not None and self._stream.can_continue:
            self._stream.switch_engine()
            self._content = msgspec.json.encode(self._stream.next_request_body())
        elif error is None or self._forwarded or not self._repeatable:
            return False
        self._stream_error = (
            self._stream_error
            or error
            or httpx.RemoteProtocolError("the stream ended without its last event")
        )
        self._end = self._chooser.clock() + self._retry_s
        return True

    def _report_failure(self, error: Exception) -> None:
        if self._engine is not None and isinstance(
            error, (*_REFUSED_ERRORS, *_LOST_ERRORS, EngineFailedInStream)
        ):
            self._chooser.record_failure(self._engine, self._chooser.clock(), sent=self._sent_at)

    def _current_engine(self) -> str:
        assert self._engine is not None, "a response comes from an engine"
        return self._engine

    def _request_to(self, engine: str) -> httpx.Request:
        headers = [(k, v) for k, v in self._request.headers.raw if k.lower() not in _REPLACED_HEADERS]
        if self._stream is not None:
            # Request uncompressed events, because compressed events cannot be split.
            headers = [(k, v) for k, v in headers if k.lower() != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        url = engine + self._request.url.raw_path.decode("ascii")
        extensions = self._request.extensions
        return httpx.Request(
            self._request.method, url, headers=headers, content=self._content, extensions=extensions
        )


class CallRouter:
    """Creates the calls of one client. Thread-safe."""

    def __init__(
        self,
        routes: Routes,
        chooser: EngineChooser,
        *,
        retry_s: float,
        refresh_loads: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._routes = routes
        self._chooser = chooser
        self._retry_s = retry_s
        self._refresh_loads = refresh_loads

    def create_call(self, request: httpx.Request, content: bytes) -> RoutedCall:
        """Create the call for a request with the body `content`."""
        self._refresh_loads(self._routes().engines)
        return RoutedCall(self._chooser, self._routes, request, content, retry_s=self._retry_s)


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def _add_class_fields(body: dict[str, Any], route: ClassRoute) -> dict[str, Any]:
    """Add the class's priority and cache salt to a request's body, unless the caller has set them."""
    fields = {"priority": route.priority, "cache_salt": route.cache_salt}
    return {name: value for name, value in fields.items() if value is not None} | body
