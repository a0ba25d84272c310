"""A proxy of the environment sees no request to services that cornplug is configured with."""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

import cornplug
from cornplug import processes
from cornplug.apps.engine_choice import LoadPoller
from cornplug.commands.warm_engine import WarmedEngine
from cornplug.encoder_service.client.remote_client import RemoteEncoder
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.errors import CornplugError
from cornplug.planner import encoder_passes, engine_steps, observed_load
from cornplug.planner.launch.launcher import _environment
from cornplug.store.far import object_store
from cornplug.store.far.client_process import _Client
from devkit.processes import wait_until

PACKAGE = Path(cornplug.__file__).parent
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
Proxied = Callable[[], int]


class _Service(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST = do_HEAD = do_PUT = _answer

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[str, list[str]]]:
    """(address, requests) of a service on loopback that answers 404."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """The number of connections to a proxy that the environment names for every address."""
    listener, seen = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                seen.append(connection)
                connection.close()
        except OSError:
            return

    thread = threading.Thread(target=accept)
    thread.start()
    for name in VARIABLES:
        for form in (name, name.upper()):
            monkeypatch.setenv(form, f"http://127.0.0.1:{listener.getsockname()[1]}")
    # As clusters have it: httpx does not understand ranges of addresses.
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    yield lambda: len(seen)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_proxy_fixture_catches_httpx(proxied: Proxied, service: tuple[str, list[str]]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(service[0])
    assert proxied() == 1


def _encode(url: str, asked: list[str]) -> None:
    with EncoderClient(url) as client:
        client.encode(b"no image", model="m")


def _remote(url: str, asked: list[str]) -> None:
    client = RemoteEncoder([url], bytes(32))
    # It asks for the service's description by itself.
    wait_until(lambda: bool(asked), deadline_s=20, what="the first request")
    client.close()


def _polled(url: str, asked: list[str]) -> None:
    LoadPoller(lambda loads: None).refresh([url])
    wait_until(lambda: bool(asked), deadline_s=20, what="the first request")


def _bucket(url: str, asked: list[str]) -> None:
    keys = {"AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": url, **keys}):
        object_store.open_s3_url("s3://bucket/cornplug").exists(["a"])


CLIENTS: dict[str, Callable[[str, list[str]], object]] = {
    "EncoderClient": _encode,
    "RemoteEncoder": _remote,
    "LoadPoller": _polled,
    "bucket": _bucket,
    "health": lambda url, _: processes.responds_ok(f"{url}/health"),
    "profiler of an encoder": lambda url, _: encoder_passes.read_pass_counter(url),
    "profiler of an engine": lambda url, _: engine_steps._metrics(url),
    "replan": lambda url, _: observed_load._get(f"{url}/metrics"),
    "warm": lambda url, _: WarmedEngine(url, model=None, api_key=None, timeout_s=10),
}


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_client_of_configured_service_uses_no_proxy(
    proxied: Proxied, service: tuple[str, list[str]], name: str
) -> None:
    url, asked = service
    with contextlib.suppress(CornplugError):  # the service has nothing to give
        CLIENTS[name](url, asked)
    assert asked, "no request came"
    assert proxied() == 0


def test_public_bucket_keeps_proxy(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    """A company's network may have no other way to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://8.8.8.8")
    assert object_store._proxy_options() == {}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert object_store._proxy_options() == {}


def test_process_of_far_client_gets_no_proxy(proxied: Proxied) -> None:
    """Mooncake's client reads its cluster's metadata by HTTP."""
    asked: list[dict[str, str]] = []

    def start(*args: Any, env: dict[str, str], **kwargs: Any) -> Any:
        asked.append(env)
        raise FileNotFoundError

    with mock.patch("subprocess.Popen", start), pytest.raises(FileNotFoundError):
        _Client("cornplug.store.far.mooncake_client", b"", {})
    assert not {name for name in asked[0] if name.lower() in VARIABLES}
    assert asked[0]["PATH"] == os.environ["PATH"]


def test_launched_command_reaches_hosts_that_it_names(proxied: Proxied) -> None:
    """Engines keep a proxy for downloads and users' media, routers for tokenizers."""
    made = _environment(["/bin/router", "--worker-urls", "http://10.1.2.3:8000", "http://node-7:8000"], {})
    for name in ("no_proxy", "NO_PROXY"):
        assert {"10.0.0.0/8", "10.1.2.3", "node-7", "127.0.0.1", "localhost"} <= {*made[name].split(",")}
    assert made["http_proxy"] == os.environ["http_proxy"]


# -- all others ----------------------------------------------------------------------------------

_MAKERS = frozenset({"AsyncClient", "Client", "delete", "get", "head", "post", "put", "request", "stream"})


def test_every_http_client_ignores_environment() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _makes_client(node.func) and not _ignores(node.keywords)
    }
    assert not found, "give it trust_env=False: http_proxy would capture requests to configured services"


def _makes_client(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "httpx"
        and function.attr in _MAKERS
    )


def _ignores(keywords: list[ast.keyword]) -> bool:
    return any(
        word.arg == "trust_env" and isinstance(word.value, ast.Constant) and word.value.value is False
        for word in keywords
    )


def test_httpx_is_the_only_http_library() -> None:
    """Others read the environment in ways that the test above does not see."""
    others = {"aiohttp", "http.client", "requests", "urllib.request", "urllib3", "websockets"}
    # A parser of addresses.
    allowed = {"vllm_connector/media/served_images.py urllib3"}
    found = {
        f"{path.relative_to(PACKAGE)} {name.partition('.')[0] if name not in others else name}"
        for path in PACKAGE.rglob("*.py")
        for name in _imported(ast.parse(path.read_text()))
        if name in others or name.partition(".")[0] in others
    }
    assert found == allowed


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
