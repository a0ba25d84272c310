"""`cornplug warm` against an engine's API, as far as the command uses it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cornplug import cli
from cornplug.commands import warm, warm_engine
from cornplug.commands.warm_engine import LineError, read_warm_file
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.errors import EncoderRefused

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class ApiStub(ThreadingHTTPServer):
    """An engine that saves what a second request has: 2 pages a prompt."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ApiCall)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.outcomes: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.counted = True
        self.says_version_at, self.version = "/version", "0.32.0"
        self.answers: Callable[[dict[str, Any]], tuple[int, dict[str, Any]] | None] = lambda body: None
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.bodies.append((path, body))
            other = self.answers(body)
            if other is not None:
                return other
            prompt = json.dumps(body.get("messages") or body.get("prompt"))
            self.seen[prompt] = self.seen.get(prompt, 0) + 1
            outcome = {1: "first_sight", 2: "stored"}.get(self.seen[prompt])
            if outcome is not None:
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 2
            return 200, {"usage": {"prompt_tokens": 150}}

    def metrics(self) -> str:
        lines = ["# TYPE cornplug_saves_total counter", "# TYPE cornplug_bytes_total counter"]
        lines += [
            f'cornplug_saves_total{{app="x",kind="kv_page",outcome="{name}"}} {count}'
            for name, count in self.outcomes.items()
        ]
        saved = self.outcomes.get("stored", 0) << 20
        lines.append(f'cornplug_bytes_total{{app="x",kind="kv_page",direction="save"}} {saved}')
        lines.append('cornplug_saved_tokens_total{app="x"} 7')
        return "\n".join(lines) + "\n"


class ApiCall(BaseHTTPRequestHandler):
    server: ApiStub

    def do_GET(self) -> None:
        if self.path == self.server.says_version_at:
            self._send(200, json.dumps({"version": self.server.version}).encode())
        elif self.path in ("/version", "/server_info"):
            self._send(404, b"{}")
        elif self.path == "/metrics":
            self._send(200 if self.server.counted else 404, self.server.metrics().encode())
        else:
            self._send(200, json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        self.server.keys.add(self.headers.get("authorization"))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, answer = self.server.ask(self.path, body)
        self._send(status, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    monkeypatch.setattr(warm, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(warm, "_STABLE_S", 0.1)
    monkeypatch.setattr(warm_engine, "_PAUSE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = ApiStub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return path

    (tmp_path / "photo.png").write_bytes(PNG)
    return write


CHAT = {"messages": [{"role": "system", "content": "Rules."}], "max_completion_tokens": 400, "n": 3}


def test_warm_puts_each_line_until_its_pages_are_stored(
    api: ApiStub, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written({"prompt": "Once"}, "", {**CHAT, "cache_salt": "acme"}, {"body": {"prompt": [1, 2]}})
    assert cli.main(["warm", str(path), "--engine", f"{api.url}/v1/", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["lines"], said["requests"], said["prompt_tokens"], said["errors"]) == (3, 3, 450, [])
    # The one that is put again while counts settle is not counted as a request.
    assert (said["pages"], said["saved_bytes"]) == ({"first_sight": 6, "stored": 6}, 6 << 20)
    sent = [body for where, body in api.bodies if where == "/v1/chat/completions"]
    assert sent[0] == {
        "model": "served", "messages": CHAT["messages"], "cache_salt": "acme", "max_tokens": 1,
        "temperature": 0, "stream": False,
    }  # fmt: skip


def test_warm_table_says_what_was_stored(
    api: ApiStub, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def count_more(body: dict[str, Any]) -> None:
        if len(api.bodies) <= 3:
            api.outcomes["present"] = len(api.bodies)
            api.outcomes["full"] = 4 * len(api.bodies)

    api.answers = count_more
    assert cli.main(["warm", str(written({"prompt": "Once"})), "--engine", api.url]) == 0
    out = capsys.readouterr().out
    assert "1 with 150 prompt tokens" in out
    assert "128 tokens (2 pages of 64, 2.0 MiB)" in out
    assert "192 tokens" in out
    assert "12 pages full" in out


def test_warm_engine_that_saves_at_once_is_asked_once(api: ApiStub, written: Callable[..., Path]) -> None:
    api.answers = lambda body: (200, {"usage": {"prompt_tokens": 5}})
    path = written(*({"prompt": f"{i}"} for i in range(20)))
    assert cli.main(["warm", str(path), "--engine", api.url]) == 0
    asked = [body["prompt"] for _, body in api.bodies]
    assert sum(1 for prompt in set(asked) if asked.count(prompt) > 1) <= 1


def test_warm_engine_without_counts_is_asked_twice_and_said_to_be_unknown(
    api: ApiStub, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    api.counted = False
    assert cli.main(["warm", str(written({"prompt": "Once"})), "--engine", api.url]) == 0
    assert len(api.bodies) == 2
    assert "unknown" in capsys.readouterr().out


def test_warm_refused_line_is_named_and_loses_no_other(
    api: ApiStub, written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        error = {"message": "too long", "param": "prompt"}
        return (400, {"error": error}) if body.get("prompt") == "long" else None

    api.answers = refuse
    path = written({"prompt": "a"}, {"prompt": "long"}, "{", {"prompt": ""}, {"prompt": "b"})
    left = tmp_path / "left.jsonl"
    assert cli.main(["warm", str(path), "--engine", api.url, "--failed", str(left)]) == 1
    seen = capsys.readouterr()
    assert seen.err.splitlines()[0] == "line 2, prompt: HTTP 400: too long"
    assert seen.err.splitlines()[1].startswith("line 3: not JSON")
    assert seen.err.splitlines()[2] == "line 4, prompt: must be a string or a list of tokens"
    assert "5, of which 3 failed" in seen.out
    assert left.read_text().splitlines() == ['{"prompt": "long"}', "{", '{"prompt": ""}']
    assert {body["prompt"] for _, body in api.bodies} == {"a", "b", "long"}


def test_warm_busy_engine_is_asked_again(api: ApiStub, written: Callable[..., Path]) -> None:
    busy = iter([(503, {"message": "busy"}), (429, {"message": "busy"})])
    api.answers = lambda body: next(busy, None)
    assert cli.main(["warm", str(written({"prompt": "Once"})), "--engine", api.url]) == 0


def test_warm_engine_that_ends_leaves_the_other_lines_undone(
    api: ApiStub,
    written: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(*({"prompt": f"{i}"} for i in range(50)))
    attempts = []

    def post(self: Any, url: str, **fields: Any) -> None:
        attempts.append(url)
        raise warm_engine.httpx.ConnectError("refused")

    monkeypatch.setattr(warm_engine.httpx.Client, "post", post)
    assert cli.main(["warm", str(path), "--engine", api.url, "--concurrency", "1"]) == 1
    assert len(attempts) == 5
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 50
    assert "refused" in err[0]
    assert "not sent" in err[49]


def test_warm_without_an_engine_there_is_one_line(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", str(written({"prompt": "a"})), "--engine", "http://127.0.0.1:9"]) == 2
    assert "--engine: http://127.0.0.1:9" in capsys.readouterr().err


def test_warm_key_comes_from_the_environment(
    api: ApiStub, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    assert cli.main(["warm", str(written({"prompt": "a"})), "--engine", api.url]) == 0
    assert api.keys == {"Bearer s3cret"}


class ClientStub:
    """An encoder service's client."""

    asked: list[tuple[str, str | None, list[bytes]]]

    decoding: str | None

    def __init__(self, url: str, **fields: Any) -> None:
        ClientStub.asked = []
        ClientStub.decoding = fields["decoding"]

    def __enter__(self) -> ClientStub:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing is open."""

    def encode_many(self, items: list[bytes], *, model: str, cache_salt: str | None) -> Iterator[Any]:
        ClientStub.asked.append((model, cache_salt, items))
        for i, item in enumerate(items):
            if item != PNG:
                yield i, EncoderRefused("no image", reason="undecodable")
                continue
            origin = "cached" if i else "computed"
            yield (
                i,
                EmbeddingRef.from_response(
                    key=bytes(32),
                    shape=(1, 1),
                    dtype="float32",
                    origin=origin,
                    service_time_s=0,
                    data=bytes(4),
                ),
            )


def test_warm_images_go_to_the_encoder_service_and_into_the_request(
    api: ApiStub,
    written: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(warm, "EncoderClient", ClientStub)
    (tmp_path / "bad.png").write_bytes(b"?")
    data = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    parts = [
        {"type": "text", "text": "What is shown?"},
        {"type": "image_url", "image_url": {"url": "photo.png", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]
    path = written(
        {"messages": [{"role": "user", "content": parts}]},
        {"images": ["photo.png", "bad.png"], "cache_salt": "acme"},
    )
    assert cli.main(["warm", str(path), "--engine", api.url, "--encoder", "http://e", "--json"]) == 1
    seen = capsys.readouterr()
    assert json.loads(seen.out)["images"] == {"computed": 2, "cached": 1}
    assert seen.err.splitlines() == ["line 2, images[1]: no image"]
    assert ClientStub.asked == [("served", None, [PNG, PNG]), ("served", "acme", [PNG, b"?"])]
    (sent, *_) = [body["messages"][0]["content"] for _, body in api.bodies]
    assert sent[1]["image_url"] == {"url": data, "detail": "low"}
    assert sent[2:] == parts[2:]


@pytest.mark.parametrize(
    ("path", "version", "options", "rule"),
    [
        ("/version", "0.32.0+cpu", [], "vllm-0.32"),
        ("/version", "0.33.1", [], "vllm-0.33"),
        ("/server_info", "0.5.23", [], "sglang-0.5.23"),
        ("/version", "0.99.0", [], None),
        ("/version", "0.33.1", ["--decoding", "vllm-0.32"], "vllm-0.32"),
        ("", "", [], None),
    ],
)
def test_warm_images_are_decoded_as_the_engine_does(
    api: ApiStub,
    written: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    version: str,
    options: list[str],
    rule: str | None,
) -> None:
    monkeypatch.setattr(warm, "EncoderClient", ClientStub)
    api.says_version_at, api.version = path, version
    file = written({"images": ["photo.png"]})
    assert cli.main(["warm", str(file), "--engine", api.url, "--encoder", "http://e", *options]) == 0
    assert ClientStub.decoding == rule


def test_warm_line_that_nothing_can_take_is_an_error(
    api: ApiStub, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", str(written({"images": ["photo.png"]})), "--engine", api.url]) == 1
    assert "line 1, images: requires --encoder" in capsys.readouterr().err


def test_warm_check_sends_nothing(written: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = written({"prompt": "a"}, {"images": ["gone.png"]})
    assert cli.main(["warm", str(path), "--check"]) == 1
    assert "line 2, images[0]: cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        ("[1]", "", "not a JSON object"),
        ("{}", "", "needs"),
        ({"prompt": "a", "messages": []}, "prompt", "combined"),
        ({"messages": "hello"}, "messages", "must be a list"),
        ({"messages": ["hello"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "must be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
            "must be a path",
        ),
        ({"images": ["data:image/png;base64,!"]}, "images[0]", "invalid base64"),
        ({"images": "a.png"}, "images", "must be a list"),
        ({"images": ["https://example.org/a.png"]}, "images[0]", "use a file"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt", "must be a string"),
    ],
)
def test_read_faulty_line_names_its_field(
    written: Callable[..., Path], line: Any, field: str, problem: str
) -> None:
    lines, errors = read_warm_file(written({"prompt": "whole"}, line, {"prompt": "whole too"}))
    assert [one.number for one in lines] == [1, 3]
    (error,) = errors
    assert (error.line, error.field) == (2, field)
    assert problem in error.problem
    assert str(LineError(2, "", "x")) == "line 2: x"


def test_read_prompt_with_other_line_separators_is_one_line(written: Callable[..., Path]) -> None:
    lines, errors = read_warm_file(written(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)))
    assert (len(lines), errors) == (1, [])
