"""Remote media: a real server that redirects, lies, stalls and hides; only name look-ups are replaced."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from expected_errors import expect_error
from hypothesis import example, given
from hypothesis import strategies as st
from time_limits import TimeLimits

from cornplug.config import Config, load
from cornplug.encoder_service.http import url_fetcher
from cornplug.encoder_service.http.fetch_slots import FetchSlots
from cornplug.encoder_service.http.url_fetcher import UrlFetcher, UrlRules
from cornplug.encoder_service.preprocess.decode_lanes import ByteBudget
from cornplug.errors import ConfigError, EncoderRefused
from cornplug.qos import DEFAULT_CLASS, ServiceClass

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service

BODY = png(sample_image(1))


class Handler(BaseHTTPRequestHandler):
    """What the tests ask for, by path."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        path, _, rest = self.path.partition("?")
        getattr(self, path.strip("/") or "image")(rest)

    def image(self, _: str) -> None:
        self._reply(200, BODY)

    def to(self, location: str) -> None:
        self._reply(302, b"", {"location": location})

    def missing(self, _: str) -> None:
        self._reply(404, b"")

    def packed(self, _: str) -> None:
        self._reply(200, b"x", {"content-encoding": "gzip"})

    def short(self, _: str) -> None:
        self._reply(200, b"abc", {"content-length": "10"})
        self.close_connection = True

    def stall(self, _: str) -> None:
        self._reply(200, b"abc", {"content-length": "10"})
        self.rfile.read(1)  # until the client has gone
        self.close_connection = True

    def endless(self, _: str) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        except OSError:
            self.close_connection = True

    def held(self, _: str) -> None:
        self.server.entered.release()  # type: ignore[attr-defined]
        assert self.server.go.wait(60)  # type: ignore[attr-defined]
        self._reply(200, BODY)

    def closing(self, _: str) -> None:
        """Ends the connection after the answer, without saying so before."""
        self._reply(200, BODY)
        self.close_connection = True

    def garbage(self, _: str) -> None:
        self.wfile.write(b"\x00\x01 no http\r\n\r\n")
        self.close_connection = True

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """A server on loopback, and the names that lead to it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.server.seen = self.seen  # type: ignore[attr-defined]
        self.server.connections = 0  # type: ignore[attr-defined]
        self._fetchers: list[UrlFetcher] = []
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.server.entered, self.server.go = self.entered, self.go  # type: ignore[attr-defined]
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def connections(self) -> int:
        return self.server.connections  # type: ignore[attr-defined,no-any-return]

    def close(self) -> None:
        for fetcher in self._fetchers:
            RUNNER.run(fetcher.close())
        self.go.set()
        self.server.shutdown()
        self.server.server_close()

    def fetcher(
        self,
        *,
        classes: Sequence[ServiceClass] = (DEFAULT_CLASS,),
        max_fetches: int = 64,
        max_waiting: int = 256,
        fetch_deadline_s: float = 30.0,
        **changes: Any,
    ) -> UrlFetcher:
        settings: dict[str, Any] = {
            "allow_hosts": f"images.test:{self.port}, *.cdn.test:{self.port}",
            "allow_networks": "127.0.0.1/32",
            "max_body_bytes": 100_000,
            **changes,
        }
        config = load({f"encoder.{k}": v for k, v in settings.items()}, environ={}).encoder
        slots = FetchSlots(classes, max_fetches, max_waiting=max_waiting)
        limits = {"max_bytes": config.max_body_bytes, "deadline_s": fetch_deadline_s}
        self._fetchers.append(UrlFetcher(UrlRules.from_config(config), slots, **limits))
        return self._fetchers[-1]

    def url(self, path: str = "image", host: str = "images.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}/{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class Names:
    """A name server: how often it was asked, and what it says, in turn; the last answer stays."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, list[list[str]]] = {}

    def getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        answers = self.answers.get(host, [["127.0.0.1"]])
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port),
            )
            for address in addresses
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[None]:
    """One event loop for the module: kept connections are of the loop that they were made in."""
    global RUNNER
    with asyncio.Runner() as RUNNER:
        yield


RUNNER = asyncio.Runner()
BUDGET = ByteBudget({DEFAULT_CLASS: 1.0}, 1 << 30, purpose="to receive it")


async def get(
    fetcher: UrlFetcher, url: str, qos: ServiceClass = DEFAULT_CLASS, deadline_s: float = 60
) -> bytes:
    with BUDGET.open_share(DEFAULT_CLASS) as held:
        return await fetcher.fetch("image", url, qos=qos, deadline_s=deadline_s, budget_share=held)


async def outcome(
    fetcher: UrlFetcher, url: str, qos: ServiceClass = DEFAULT_CLASS, deadline_s: float = 60
) -> str:
    """ "ok", or the refusal's reason."""
    try:
        await get(fetcher, url, qos, deadline_s)
    except EncoderRefused as e:
        return e.reason
    return "ok"


def fetch(fetcher: UrlFetcher, url: str) -> bytes:
    return RUNNER.run(get(fetcher, url))


def refusal(fetcher: UrlFetcher, url: str) -> str:
    with pytest.raises(EncoderRefused, match="image: ") as e:
        fetch(fetcher, url)
    return e.value.reason


def test_url_fetcher_listed_host_is_fetched_by_name(site: Site, names: Names) -> None:
    for host in ("images.test", "a.cdn.test", "a.b.cdn.test", "IMAGES.test", "images.test."):
        assert fetch(site.fetcher(), site.url(host=host)) == BODY
    path, headers = site.seen[0]
    assert path == "/image"
    assert headers["host"] == f"images.test:{site.port}"
    assert headers["accept-encoding"] == "identity"
    assert not headers.keys() & {"cookie", "authorization"}


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere.test/x",
        "http://cdn.test/x",
        "http://xcdn.test/x",
        "http://images.test.evil.test/x",
        "http://evil.test/images.test",
        "http://evil.test#@images.test/",
        "http://evil.test\\@images.test/",
        "http://images.test@evil.test/",
        "http://user:word@images.test/",
        "http://images.test:22/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://0x7f000001/",
        "http://2130706433/",
        "http:///x",
        "http://",
        "http://images.test\r\nx: y/",
        "http://images.test:port/",
        "http://ｐictures.tеst/",
        "http://images.test/" + "a" * 5000,
        "https://xn--/",
    ],
)
def test_url_fetcher_unlisted_url_is_not_resolved(site: Site, names: Names, url: str) -> None:
    assert refusal(site.fetcher(), url) == "remote_url"
    assert not names.asked
    assert not site.seen


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["127.0.0.2"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["::ffff:127.0.0.2"],
        ["fe80::1"],
        ["fd00::1"],
        ["224.0.0.1"],
        ["0.0.0.0"],
        ["100.64.0.1"],
        ["64:ff9b::7f00:2"],
        ["2002:7f00:2::"],
        ["fec0::1"],
        ["192.88.99.1"],
        ["::ffff:192.88.99.1"],
        ["127.0.0.1", "10.0.0.1"],
        ["255.255.255.255"],
    ],
)
def test_url_fetcher_private_address_is_refused(site: Site, names: Names, addresses: list[str]) -> None:
    names.answers["images.test"] = [addresses]
    assert refusal(site.fetcher(), site.url()) == "remote_url"
    assert not site.seen


def test_url_rules_mapped_address_counts_as_ipv4(site: Site) -> None:
    assert site.fetcher()._rules.allows_address(ipaddress.ip_address("::ffff:127.0.0.1"))


def test_url_fetcher_name_is_resolved_once(site: Site, names: Names) -> None:
    """DNS rebinding: a second answer would lead to another machine."""
    names.answers["images.test"] = [["127.0.0.1"], ["10.0.0.1"]]
    assert fetch(site.fetcher(), site.url()) == BODY
    assert names.asked == ["images.test"]


def test_url_fetcher_redirects_are_checked_again(site: Site, names: Names) -> None:
    def to(location: str) -> str:
        return site.url(f"to?{location}")

    assert fetch(site.fetcher(), to("/image")) == BODY
    assert fetch(site.fetcher(), to(site.url(host="a.cdn.test"))) == BODY
    for location in (
        "http://elsewhere.test/",
        f"http://127.0.0.1:{site.port}/image",
        "file:///etc/passwd",
        "ftp://images.test/x",
        "gopher://images.test/",
        "http://u:p@images.test/",
        "//elsewhere.test/",
        "http://images.test:22/",
        "data:image/png;base64,AAAA",
    ):
        assert refusal(site.fetcher(), to(location)) == "remote_url"
    assert "elsewhere.test" not in names.asked
    names.answers["b.cdn.test"] = [["10.0.0.1"]]
    assert refusal(site.fetcher(), to(site.url(host="b.cdn.test"))) == "remote_url"


def test_url_fetcher_fourth_redirect_is_refused(site: Site, names: Names) -> None:
    chain = "image"
    for _ in range(3):
        chain = f"to?/{chain}"
    assert fetch(site.fetcher(), site.url(chain)) == BODY
    assert refusal(site.fetcher(), site.url(f"to?/{chain}")) == "remote_url"
    site.seen.clear()
    assert refusal(site.fetcher(), site.url("to?")) == "remote_url"
    assert len(site.seen) == 4


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "remote_failed"),
        ("packed", "remote_failed"),
        ("short", "remote_failed"),
        ("garbage", "remote_failed"),
        ("endless", "too_large"),
        ("stall", "remote_timeout"),
    ],
)
def test_url_fetcher_faulty_server_fails_in_time(
    site: Site, names: Names, path: str, reason: str, within: TimeLimits
) -> None:
    deadline_s = 0.5 if reason == "remote_timeout" else 30
    with within(15):
        assert refusal(site.fetcher(fetch_deadline_s=deadline_s), site.url(path)) == reason


def test_url_fetcher_dead_host_or_unknown_name_fails(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.close()
    assert refusal(site.fetcher(), site.url()) == "remote_failed"

    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refusal(site.fetcher(), site.url()) == "remote_failed"


def test_url_fetcher_ignores_proxies_of_environment(
    site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch(site.fetcher(), site.url()) == BODY


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_url_fetcher_certificate_must_match_name(
    names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=images.test"]
    command += ["-addext", "subjectAltName=DNS:images.test"]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    site = Site(server)
    try:
        assert refusal(site.fetcher(), site.url(scheme="https")) == "remote_failed"
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        trusting = site.fetcher()
        assert fetch(trusting, site.url(scheme="https")) == BODY
        assert refusal(trusting, site.url(scheme="https", host="a.cdn.test")) == "remote_failed"
        downgrade = site.url("to?" + site.url(), scheme="https")
        assert refusal(trusting, downgrade) == "remote_url"
    finally:
        site.close()


@pytest.mark.parametrize(
    "nothing", [{"CORNPLUG_ENCODER_ALLOW_HOSTS": ""}, {"CORNPLUG_CONFIG": "no_hosts.toml"}]
)
def test_url_fetcher_without_hosts_fetches_nothing(
    names: Names, nothing: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_hosts.toml").write_text("[encoder]\nallow_hosts = []\n")
    monkeypatch.chdir(tmp_path)
    fetcher = UrlFetcher.from_config(load({}, environ=nothing).encoder, [DEFAULT_CLASS])
    assert refusal(fetcher, "http://images.test/") == "remote_url"
    assert not names.asked


def test_url_fetcher_url_and_bytes_give_same_key(
    site: Site, names: Names, make_encoder: MakeEncoder, config: Config, llava_pair: tuple[Path, Path]
) -> None:
    changes = {
        "allow_hosts": (f"images.test:{site.port}",),
        "allow_networks": "127.0.0.1",
    }
    encoder = config.encoder.model_copy(update=changes)
    service = Service(make_encoder(), config.model_copy(update={"encoder": encoder}))
    model = str(llava_pair[0])
    by_url = service.post(json={"model": model, "image": site.url()}).json()
    by_bytes = service.post(data={"model": model}, files={"image": BODY}).json()
    assert (by_url["key"], by_url["data"]) == (by_bytes["key"], by_bytes["data"])
    assert by_bytes["origin"] == "cached"
    refused = service.post(json={"model": model, "image": site.url(host="elsewhere.test")})
    assert (refused.status_code, refused.json()["error"]["reason"]) == (422, "remote_url")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allow_hosts", "http://x.org"),
        ("allow_hosts", "*.*"),
        ("allow_hosts", "images.*"),
        ("allow_hosts", "x.org:http"),
        ("allow_hosts", "x.org:0"),
        ("allow_hosts", "x.org:65536"),
        ("allow_hosts", "x.org:80:80"),
        ("allow_hosts", "x.org:"),
        ("allow_hosts", "[x.org]:80"),
        ("allow_hosts", "http://x.org:80"),
        ("allow_networks", "10.0.0.1/8"),
    ],
)
def test_url_rules_invalid_settings_are_refused(field: str, value: str) -> None:
    with expect_error(ConfigError, field=f"encoder.{field}"):
        UrlRules.from_config(load({f"encoder.{field}": value}, environ={}).encoder)


def test_url_rules_port_belongs_to_the_entry_that_matches() -> None:
    entries = "a.test, b.test:8080, *.cdn.test, *.cdn.test:8443, [fd00::1]:8080, fd00::2, fd00::3:80"
    rules = UrlRules.from_config(load({"encoder.allow_hosts": entries}, environ={}).encoder)
    ports = (22, 80, 443, 8080, 8443)
    expected = {
        "a.test": [80, 443],
        "b.test": [8080],
        "x.cdn.test": [80, 443, 8443],
        "fd00::1": [8080],
        "fd00::2": [80, 443],
        "fd00::3:80": [80, 443],
        "fd00::3": [],
        "c.test": [],
    }
    assert {host: [port for port in ports if rules.allows_port(host, port)] for host in expected} == expected


def test_url_rules_any_host_allows_default_ports_only() -> None:
    rules = UrlRules.from_config(load({"encoder.allow_hosts": "*, b.test:8080"}, environ={}).encoder)
    assert [port for port in (22, 80, 443, 8080) if rules.allows_port("a.test", port)] == [80, 443]
    assert [port for port in (22, 80, 443, 8080) if rules.allows_port("b.test", port)] == [80, 443, 8080]
    rules = UrlRules.from_config(load({"encoder.allow_hosts": "*:8080"}, environ={}).encoder)
    assert [port for port in (22, 80, 443, 8080) if rules.allows_port("a.test", port)] == [8080]


NO_RULES = UrlRules(hosts=(), networks=())


@given(st.ip_addresses(v=4))
@example(ipaddress.IPv4Address("10.1.2.3"))
@example(ipaddress.IPv4Address("8.8.8.8"))
def test_url_rules_embedded_address_follows_plain_one(v4: ipaddress.IPv4Address) -> None:
    plain = NO_RULES.allows_address(v4)
    for form in (f"::ffff:{v4}", f"64:ff9b::{v4}"):
        assert NO_RULES.allows_address(ipaddress.ip_address(form)) == plain
    for form in (f"::{v4}", f"64:ff9b:1::{v4}"):
        assert not NO_RULES.allows_address(ipaddress.ip_address(form))
    if v4.is_private or v4.is_multicast:
        assert not plain


PUBLIC = ("8.8.8.8", "2001:4860:4860::8888")
CLOSED = (
    *(
        "127.0.0.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "224.0.0.1",
        "::",
        "::1",
    ),
    *("fc00::1", "fe80::1", "fec0::1", "ff02::1", "5f00::1", "2002:a00:1::1", "2001::1", "192.88.99.1"),
    # Metadata of clouds: AWS, GCP and Azure; containers of AWS; Alibaba; Azure's agent; Oracle; AWS by IPv6.
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"),
)


def test_url_rules_by_default_allow_every_public_host() -> None:
    """An engine without a tower takes the URLs that a stock one takes."""
    rules = UrlRules.from_config(load({}, environ={}).encoder)
    assert rules.allows_host("images.example.org")
    addresses = {text: rules.allows_address(ipaddress.ip_address(text)) for text in PUBLIC + CLOSED}
    assert addresses == {**dict.fromkeys(PUBLIC, True), **dict.fromkeys(CLOSED, False)}
    listed = UrlRules.from_config(load({"encoder.allow_networks": "168.63.129.16"}, environ={}).encoder)
    assert listed.allows_address(ipaddress.ip_address("168.63.129.16"))


def test_url_fetcher_any_host_is_held_to_the_rules_about_addresses(site: Site, names: Names) -> None:
    fetcher = UrlFetcher.from_config(load({}, environ={}).encoder, [DEFAULT_CLASS])
    names.answers["inside.test"] = [["8.8.8.8", "10.0.0.1"]]
    assert refusal(fetcher, "http://inside.test/") == refusal(fetcher, "http://127.0.0.1/") == "remote_url"
    fetcher = site.fetcher(allow_hosts=f"*, *:{site.port}")
    assert fetch(fetcher, site.url(host="somewhere.test")) == BODY
    names.answers["inside.test"] = [["10.0.0.1"]]
    names.answers["metadata.test"] = [["169.254.169.254"]]
    for url in (
        site.url(host="inside.test"),
        site.url(host="metadata.test"),
        site.url("to?" + site.url(host="inside.test")),
        "http://somewhere.test:22/",
        "file:///etc/passwd",
        "http://user:word@somewhere.test/",
    ):
        assert refusal(fetcher, url) == "remote_url"
    names.answers["127.0.0.1"] = names.answers["localhost"] = [["127.0.0.1"]]
    public_only = site.fetcher(allow_hosts=f"*:{site.port}", allow_networks="")
    for host in ("somewhere.test", "127.0.0.1", "localhost", "0x7f000001"):
        assert refusal(public_only, site.url(host=host)) == "remote_url"


def test_url_fetcher_time_of_a_fetch_begins_with_its_slot(site: Site, names: Names) -> None:
    """Before: the wait for a slot was part of it, so that good URLs failed under load."""
    fetcher = site.fetcher(max_fetches=1, fetch_deadline_s=1.0)

    async def scenario() -> list[str]:
        return await asyncio.gather(outcome(fetcher, site.url("stall")), outcome(fetcher, site.url()))

    assert RUNNER.run(scenario()) == ["remote_timeout", "ok"]


def test_url_fetcher_slow_host_holds_up_its_class_only(site: Site, names: Names) -> None:
    mine, theirs = ServiceClass(name="mine", share=0.5), ServiceClass(name="theirs", share=0.5, priority=9)
    fetcher = site.fetcher(max_fetches=4, classes=[mine, theirs])

    async def scenario() -> list[str]:
        slow = [asyncio.create_task(outcome(fetcher, site.url("held"), theirs)) for _ in range(8)]
        for _ in range(2):
            assert await asyncio.to_thread(site.entered.acquire, timeout=60)
        assert [await outcome(fetcher, site.url(), mine) for _ in range(5)] == ["ok"] * 5
        assert not any(task.done() for task in slow)
        site.go.set()
        return list(await asyncio.gather(*slow))

    assert RUNNER.run(scenario()) == ["ok"] * 8


def test_url_fetcher_full_queue_is_refused_with_a_pause(site: Site, names: Names) -> None:
    fetcher = site.fetcher(max_fetches=1, max_waiting=1)

    async def scenario() -> list[str]:
        first = [asyncio.create_task(outcome(fetcher, site.url("held"))) for _ in range(2)]
        assert await asyncio.to_thread(site.entered.acquire, timeout=60)
        with expect_error(EncoderRefused, reason="fetches_full") as full:
            await get(fetcher, site.url())
        assert full.value.retry_after_s is not None
        assert full.value.retry_after_s > 0
        site.go.set()
        return list(await asyncio.gather(*first))

    assert RUNNER.run(scenario()) == ["ok", "ok"]


def test_url_fetcher_without_a_slot_in_time_is_full(site: Site, names: Names) -> None:
    fetcher = site.fetcher(max_fetches=1)

    async def scenario() -> tuple[str, list[str]]:
        first = asyncio.create_task(outcome(fetcher, site.url("held")))
        assert await asyncio.to_thread(site.entered.acquire, timeout=60)
        late = await outcome(fetcher, site.url(), deadline_s=0.2)
        gone = asyncio.create_task(outcome(fetcher, site.url()))
        await asyncio.sleep(0)
        gone.cancel()
        site.go.set()
        return late, [await first, await outcome(fetcher, site.url())]

    assert RUNNER.run(scenario()) == ("fetches_full", ["ok", "ok"])


def test_url_fetcher_slow_name_server_keeps_the_slot(
    site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up cannot be ended. Threads of a shared pool would all be in one, and no other class had any."""
    go = threading.Event()
    real = names.getaddrinfo

    def slow(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if host == "images.test":
            assert go.wait(60)
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    fetcher = site.fetcher(max_fetches=1, fetch_deadline_s=0.2)

    async def scenario() -> list[str]:
        first = await outcome(fetcher, site.url())
        second = await outcome(fetcher, site.url(host="a.cdn.test"), deadline_s=0.2)
        go.set()
        return [first, second, await outcome(fetcher, site.url(host="a.cdn.test"))]

    assert RUNNER.run(scenario()) == ["remote_timeout", "fetches_full", "ok"]


def test_url_fetcher_connection_is_kept_for_its_host(site: Site, names: Names) -> None:
    fetcher = site.fetcher()
    for _ in range(5):
        assert fetch(fetcher, site.url()) == BODY
    assert site.connections == 1
    # Another name at the same address is another server, as far as a certificate tells.
    assert fetch(fetcher, site.url(host="a.cdn.test")) == BODY
    assert site.connections == 2
    RUNNER.run(fetcher.close())


def test_url_fetcher_kept_connection_that_ended_is_made_again(site: Site, names: Names) -> None:
    fetcher = site.fetcher()
    for _ in range(4):
        assert fetch(fetcher, site.url("closing")) == BODY
    assert fetch(fetcher, site.url()) == BODY


def test_url_fetcher_moved_host_is_asked_at_its_new_address(site: Site, names: Names) -> None:
    """A kept connection never stands in for the check of an address."""
    fetcher = site.fetcher()
    assert fetch(fetcher, site.url()) == BODY
    names.answers["images.test"] = [["10.0.0.1"]]
    assert refusal(fetcher, site.url()) == "remote_url"


def test_url_fetcher_full_service_answers_503_with_retry_after(
    site: Site,
    names: Names,
    make_encoder: MakeEncoder,
    config: Config,
    llava_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(url_fetcher, "MAX_FETCHES", 1)
    monkeypatch.setattr(url_fetcher, "MAX_WAITING", 1)
    changes = {"allow_hosts": (f"*:{site.port}",), "allow_networks": "127.0.0.1"}
    encoder = config.encoder.model_copy(update=changes)
    service = Service(make_encoder(), config.model_copy(update={"encoder": encoder}))

    async def scenario() -> Any:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://e", timeout=60) as client:

            async def ask() -> httpx.Response:
                body = {"model": str(llava_pair[0]), "image": site.url("held")}
                return await client.post("/v1/encode", json=body)

            first = asyncio.create_task(ask())
            assert await asyncio.to_thread(site.entered.acquire, timeout=60)
            second, third = asyncio.create_task(ask()), asyncio.create_task(ask())
            done, _ = await asyncio.wait({second, third}, return_when=asyncio.FIRST_COMPLETED)
            site.go.set()
            await asyncio.wait({second, third})
            return next(iter(done)).result(), (await first).status_code

    full, status = RUNNER.run(scenario())
    assert (full.status_code, full.json()["error"]["reason"]) == (503, "fetches_full")
    assert int(full.headers["retry-after"]) >= 1
    assert status == 200
