"""A small HTTP server that answers as an engine does: tokens of a fixed story."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STORY = (
    "Once", " upon", " a", " time", ",", "\n\n", "there", " was", " a", " cache", " that", " knew",
    " every", " word", " it", " had", " seen", " before", ".", "\n", "The", " end", ".",
)  # fmt: skip
TOLD = "".join(STORY)

Act = Callable[["_Handler"], None]


@dataclass
class Seen:
    """A request that an engine got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeEngine:
    """One server. Each request takes the next act of `script`; without one it is answered well."""

    url: str
    name: str
    script: deque[Act] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    metrics: str = ""
    strips: bool = False
    """Its chat template strips messages."""
    story: tuple[str, ...] = STORY

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [one.body for one in self.seen]


@contextmanager
def engines(number: int) -> Iterator[list[FakeEngine]]:
    """Engines that listen, with the names "a", "b", ..."""
    servers = []
    found = []
    for i in range(number):
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # a caller may close a stream early
        engine = FakeEngine(f"http://127.0.0.1:{server.server_address[1]}", "abcdef"[i])
        server.engine = engine  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        found.append(engine)
    try:
        yield found
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def refuse(status: int, retry_after: str | None = None) -> Act:
    """Answer with an error status."""

    def act(handler: _Handler) -> None:
        headers = {} if retry_after is None else {"retry-after": retry_after}
        error = {"error": {"message": f"{status} of {handler.engine.name}", "code": status}}
        handler.answer(status, error, headers)

    return act


def hang_up(handler: _Handler) -> None:
    """Die before the first byte of the answer."""
    handler.die()


def die_after(tokens: int) -> Act:
    """Die in the middle of an event, after so many tokens of a stream."""
    return lambda handler: handler.stream(dies_after=tokens)


def fail_after(tokens: int) -> Act:
    """End the stream by an error's event, as a server whose engine process ended."""
    return lambda handler: handler.stream(fails_after=tokens)


def die_before_events(handler: _Handler) -> None:
    """Die after the headers of a stream."""
    handler.begin_stream()
    handler.die()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: FakeEngine

    def setup(self) -> None:
        super().setup()
        self.engine = self.server.engine  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            page = self.engine.metrics.encode()
            self.head(200 if page else 404, {"content-length": str(len(page))})
            self.wfile.write(page)
            return
        self._note({})
        self._act(lambda handler: handler.answer(200, {"object": "list", "data": [], "at": self.engine.name}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._note(body)
        self._act(lambda handler: handler.stream() if body.get("stream") else handler.whole())

    def _note(self, body: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.engine.seen.append(Seen(self.path, headers, body))

    def _act(self, well: Act) -> None:
        (self.engine.script.popleft() if self.engine.script else well)(self)

    @property
    def _body(self) -> dict[str, Any]:
        return self.engine.seen[-1].body

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        common = {"content-type": "application/json", "content-length": str(len(content))}
        self.head(status, common | (headers or {}))
        self.wfile.write(content)

    def die(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def whole(self) -> None:
        tokens = self._tokens()
        if "messages" in self._body:
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(tokens)}}
        else:
            choice = {"index": 0, "text": "".join(tokens)}
        choice["finish_reason"] = "stop"
        self.answer(200, {**self._common(), "choices": [choice], "usage": self._usage(len(tokens))})

    def begin_stream(self) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        self.head(200, headers)

    def stream(self, dies_after: int | None = None, fails_after: int | None = None) -> None:
        self.begin_stream()
        options = self._body.get("stream_options") or {}
        if "messages" in self._body:
            self._choice({"delta": {"role": "assistant", "content": ""}}, 0, options)
        tokens = self._tokens()
        for number, token in enumerate(tokens, 1):
            if dies_after == number - 1:
                self._chunk(b'data: {"id": "half of an ev')
                self.die()
                return
            if fails_after == number - 1:
                self._event(
                    {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
                )
                break
            part = {"delta": {"content": token}} if "messages" in self._body else {"text": token}
            last = {"finish_reason": "stop" if tokens[-1] == STORY[-1] else "length"}
            self._choice(part | (last if number == len(tokens) else {}), number, options)
        else:
            if dies_after == len(tokens):
                self.die()
                return
            if options.get("include_usage"):
                self._event({**self._common(), "choices": [], "usage": self._usage(len(tokens))})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _choice(self, part: dict[str, Any], tokens: int, options: dict[str, Any]) -> None:
        choice = {"index": 0, "finish_reason": None} | part
        usage = {"usage": self._usage(tokens)} if options.get("continuous_usage_stats") else {}
        self._event({**self._common(), "choices": [choice], **usage})

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _common(self) -> dict[str, Any]:
        kind = "chat.completion" if "messages" in self._body else "text_completion"
        chunk = ".chunk" if self._body.get("stream") and "messages" in self._body else ""
        name = self.engine.name
        return {"id": f"id-{name}", "object": kind + chunk, "created": ord(name), "model": "model"}

    def _usage(self, tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}

    def _tokens(self) -> tuple[str, ...]:
        """Those after the text so far."""
        body, story = self._body, self.engine.story
        if body.get("continue_final_message"):
            so_far = body["messages"][-1]["content"]
        else:
            so_far = "" if "messages" in body else body["prompt"].partition(">")[2]
        so_far = so_far.strip() if self.engine.strips else so_far
        said = 0
        while len("".join(story[:said])) < len(so_far):
            said += 1
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or len(story)
        return story[said : said + limit]
