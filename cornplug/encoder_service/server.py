"""Run the encoder service: load vision and audio towers once, for engines and HTTP clients.

SIGTERM and SIGINT drain the service: it refuses new requests, completes requests in flight, and exits with
status 0. SIGHUP loads the weights that are now on disk, without interrupting the service (`WeightReloader`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import uvicorn
from rich.console import Console
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cornplug.config import Config, EncoderConfig, load
from cornplug.encoder_service.access import AuditLog, check_exposure
from cornplug.encoder_service.execution.encoder import MAX_BATCH_TOKENS, EncoderCore, EncoderLimits
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.http.access_control import DrainState
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.http.url_fetcher import UrlRules
from cornplug.encoder_service.model_registry import ModelRegistry, Report
from cornplug.encoder_service.replica import (
    ReplicaExecutor,
    ReplicaMetrics,
    ReplicaSettings,
    count_cores,
    open_replicas,
    replica_devices,
)
from cornplug.encoder_service.request_observer import open_tracing
from cornplug.encoder_service.server_flags import build_parser, check_flags, setting_overrides
from cornplug.encoder_service.sglang_server import language_only_urls
from cornplug.encoder_service.unix_server import UnixServer
from cornplug.errors import CheckpointError, ConfigError, EncoderRefused
from cornplug.local_socket import SocketClaim
from cornplug.private_paths import read_secret
from cornplug.qos import QosClasses
from cornplug.store.arena import host_memory
from cornplug.store.client import open_store

HEADER_TIMEOUT_S: Final = 10.0
"""Minimum seconds after which a connection without complete request headers is closed. It is closed after at
most twice this time."""
BACKLOG: Final = 128
"""Maximum number of connections that wait to be accepted."""
_MAX_CONNECTIONS: Final = 4096
"""Maximum number of HTTP connections. At this number, each new connection closes the oldest idle
connection."""
_RESERVED_DESCRIPTORS: Final = 512
"""File descriptors reserved for engines, replicas, files, fetches, and connections that are being closed."""
_MIN_CONNECTIONS: Final = 64
log = logging.getLogger(__name__)
_MIN_REFUSAL_S: Final = 1.0
"""Minimum seconds for sending refusals to requests that are still running at the end of `encoder.drain_s`."""
CPU_BATCH_TOKENS: Final = 2048
"""Default maximum number of tokens in a batch on a CPU. A few images already use a core fully, so larger
batches would only increase latency."""
TENANT_FRACTION: Final = 0.5
"""Maximum fraction of the store that entries from one tenant's HTTP requests may fill. For requests without a
tenant, the same limit applies to each service class."""
PREPARED_FRACTION: Final = 0.25
"""Maximum fraction of the memory of the host or control group for decoded and preprocessed media."""
UNREAD_TIMEOUT_S: Final = 30.0
"""Maximum seconds for which a client may leave its reply unread."""
SOCKET_CHECK_S: Final = 5.0
"""Seconds between checks whether the socket's file exists. A cleaner of temporary folders may remove the
file."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit for file descriptors to the hard limit, but not above 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Return the maximum number of HTTP connections, from this process's limit for file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft - _RESERVED_DESCRIPTORS))
    )


class HeaderTimeoutProtocol(AutoHTTPProtocol):
    """One HTTP connection, with a deadline for request headers and a limit on the number of connections.

    Without this class, uvicorn waits for headers indefinitely, and accepts connections until the process has
    no file descriptors left. `BodyLimitMiddleware` sets a deadline for bodies, and uvicorn's keep-alive
    timeout applies between requests. Every `HEADER_TIMEOUT_S` seconds, the connection checks whether a
    request has started since the last check.
    """

    most: ClassVar[int] = _MAX_CONNECTIONS
    others: ClassVar[dict[HeaderTimeoutProtocol, None]] = {}
    """All connections of this server, oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._last_cycle: object = self  # initially a value that differs from every cycle
        self._idle_timer: asyncio.TimerHandle = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_idle)
        if len(self.others) >= self.most:
            self._choose_evicted().transport.abort()
        self.others[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.cancel()
        self.others.pop(self, None)
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        cycle: Any = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle and cycle is self._last_cycle:
            self.transport.close()
            return
        self._last_cycle = cycle
        self._idle_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_idle)

    def _choose_evicted(self) -> HeaderTimeoutProtocol:
        """Return the connection to close, so that the number of connections stays within the limit.

        Return the oldest idle connection, or the oldest connection with an incomplete request if no
        connection is idle. If all other connections wait for replies, return this connection.
        """
        begun = None
        for one in self.others:
            cycle: Any = one.cycle
            if one.transport.is_closing():
                continue
            if cycle is None or cycle.response_complete:
                return one
            if begun is None and cycle.more_body and not cycle.response_started:
                begun = one
        return begun or self


def limited_protocol(most: int) -> type[HeaderTimeoutProtocol]:
    """Return a protocol class for one server with at most `most` connections."""
    return type("Limited", (HeaderTimeoutProtocol,), {"most": most, "others": {}})


class _Uvicorn(uvicorn.Server):
    """uvicorn server without its signal handlers, which would raise the signal again after shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundListeners:
    """Listening sockets of the service. They are bound before weights are read, so that a wrong port or path
    fails immediately."""

    unix: SocketClaim
    http: socket.socket

    @classmethod
    def open(cls, config: Config) -> BoundListeners:
        """Bind both sockets. Raises ConfigError with the address if it is in use."""
        encoder = config.encoder
        family = socket.AF_INET6 if ":" in encoder.host else socket.AF_INET
        http = socket.socket(family, socket.SOCK_STREAM)
        http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this option, which disconnects a client that does not read its reply.
        http.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000))
        try:
            http.bind((encoder.host, encoder.port))
            http.listen(BACKLOG)
        except OSError as e:
            http.close()
            raise ConfigError(
                "encoder.port",
                f"cannot listen on {encoder.host}:{encoder.port}: {e.strerror}",
                "Set another --port, or 0 for any free port.",
            ) from e
        try:
            unix = SocketClaim(encoder.socket, setting="encoder.socket")
        except ConfigError:
            http.close()
            raise
        return cls(unix=unix, http=http)

    def close(self) -> None:
        """Close both sockets, remove the unix socket's file, and release the file's lock for the next
        service."""
        self.unix.close()
        self.http.close()


def uvicorn_config(app: ASGIApp, config: EncoderConfig) -> uvicorn.Config:
    """Return uvicorn's settings for the HTTP server."""
    return uvicorn.Config(
        app,
        http=limited_protocol(max_connections()),
        ws="none",
        # The client's address is the connection's peer. Forwarding headers are ignored, even from this host.
        proxy_headers=False,
        server_header=False,
        # uvicorn may accept this many connections in one iteration of the loop, before any connection is
        # closed.
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(config.drain_s),
    )


async def serve(encoder: EncoderCore, config: Config, listeners: BoundListeners, *, secret: bytes) -> None:
    """Serve until SIGTERM or SIGINT, then drain. During the drain, `/ready` returns status 503."""
    gate, drain_s = DrainState(), config.encoder.drain_s
    app = create_app(encoder, config.encoder, secret=secret, drain_state=gate)
    web = _Uvicorn(uvicorn_config(app, config.encoder))
    endpoint = UnixServer(encoder, listeners.unix.listener, secret=secret)
    await endpoint.start()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    # Keep strong references, because the loop has only weak references to its tasks.
    reloads: set[asyncio.Future[None]] = set()

    def reload() -> None:
        task = loop.run_in_executor(None, _reload_weights, encoder)
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    renewing = asyncio.create_task(_renew_socket(listeners.unix, endpoint))
    serving = asyncio.create_task(web.serve(sockets=[listeners.http]))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    renewing.cancel()
    end = loop.time() + drain_s
    endpoint.stop_accepting()
    gate.close()
    # HTTP requests in flight may still submit media, so wait for these requests before closing the encoder.
    await gate.wait_idle(drain_s)
    await asyncio.to_thread(encoder.drain, max(end - loop.time(), 0.0))
    # `close` refuses requests that are still being decoded or computed, so that their clients get a reply.
    await asyncio.to_thread(encoder.close)
    web.config.timeout_graceful_shutdown = math.ceil(max(end - loop.time(), _MIN_REFUSAL_S))
    web.should_exit = True
    await serving
    await endpoint.close()


async def _renew_socket(claim: SocketClaim, endpoint: UnixServer) -> None:
    """Recreate the socket's file whenever the file disappears, until another service listens at its path."""
    while True:
        await asyncio.sleep(SOCKET_CHECK_S)
        # Called on the loop's thread, so that the socket is never recreated in the middle of an iteration.
        listener = claim.renew()
        if listener is None:
            log.error(
                "another encoder service now uses the unix socket, so this service continues with HTTP only"
            )
            endpoint.stop_accepting()
            return
        await endpoint.replace_listener(listener)


def _reload_weights(encoder: EncoderCore) -> None:
    try:
        changed = encoder.reload()
    except (CheckpointError, EncoderRefused) as e:
        AuditLog().log_signal_operation("reload", failed=str(e))
        log.error("the weights were not reloaded: %s. The previous weights stay in use.", e)
    else:
        AuditLog().log_signal_operation("reload", changed=[model.name for model in changed])
        names = ", ".join(f"{model.name} (epoch {model.epoch})" for model in changed)
        log.info("reload: %s", f"reloaded {names}" if names else "no weights have changed")


def main(argv: Sequence[str]) -> int:
    """Run the service until a signal ends it. Raises ConfigError or CheckpointError at startup."""
    args = build_parser((__doc__ or "").partition("\n")[0]).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = load(setting_overrides(args))
    check_flags(args)
    raise_descriptor_limit()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # Check the settings before loading the models, which may take minutes.
    UrlRules.from_config(config.encoder)
    check_exposure(config.encoder, config.qos)
    listeners = BoundListeners.open(config)
    try:
        with console.status("loading") as status:

            def report(line: str) -> None:
                status.update(line)
                console.print(line, soft_wrap=True)

            registry, replicas = _open_models(args, report)
        secret = read_secret(config.store.secret_file)
        store = None if args.no_store else open_store(config.store, autostart=False)
        # Use the background timeout, because no engine waits for these calls. If the store fails, results are
        # not shared, but requests succeed.
        cache = ResultCache(
            store, deadline_s=config.store.background_timeout_s, account_fraction=TENANT_FRACTION
        )
        tracing = open_tracing()
        encoder = EncoderCore(
            registry,
            cache,
            secret=secret,
            executors=replicas,
            tracing=tracing,
            limits=EncoderLimits(
                max_batch_tokens=config.encoder.max_batch_tokens
                or (CPU_BATCH_TOKENS if args.device == "cpu" else MAX_BATCH_TOKENS),
                max_prepared_bytes=int(host_memory().total_bytes * PREPARED_FRACTION),
                admission_threads=config.encoder.prepare_threads,
            ),
            classes=QosClasses(config.qos),
        )
        encoder.metrics.registry.register(ReplicaMetrics(replicas))
        host, port = listeners.http.getsockname()[:2]
        console.print(f"serving {registry.summary()} at http://{host}:{port} and {config.encoder.socket}")
        for url in language_only_urls(registry.served_models(), port) if config.encoder.sglang else ():
            console.print(f"for SGLang: --language-only --encoder-urls {url}")
        ended = False
        try:
            asyncio.run(serve(encoder, config, listeners, secret=secret))
        finally:
            ended = encoder.close()
            for replica in replicas:
                replica.close()
            tracing.close()
            if store is not None:
                store.close()
    finally:
        listeners.close()
    console.print("stopped")
    if not ended:
        # A tower's layer or an image processor cannot be interrupted, and Python would wait for its thread.
        logging.shutdown()
        os._exit(0)
    return 0


def _open_models(args: argparse.Namespace, report: Report) -> tuple[ModelRegistry, list[ReplicaExecutor]]:
    """Load the models and start the worker processes. With --replicas 0, there are no worker processes, and
    this process computes the embeddings."""
    devices = replica_devices(args.device, args.replicas) if args.replicas else []
    threads = args.threads or max(1, count_cores() // max(1, len(devices)))
    if not devices:
        # On a CPU, leave one core to the engines and to this process's other threads. Computing threads wait
        # for each other at each operation, so if one thread is interrupted, all of them wait. With a GPU, the
        # cores only prepare media. Each preparing thread would start one torch thread per core.
        threads = args.threads or (max(1, count_cores() - 1) if args.device == "cpu" else 1)
        torch.set_num_threads(threads)
        return ModelRegistry.open(
            args.model, dtype=args.dtype, device=args.device, compile=args.compile, report=report
        ), []
    torch.set_num_threads(1)  # same as for a GPU in this process
    registry = ModelRegistry.open(args.model, dtype=args.dtype, device="meta", report=report)
    report(f"starting {len(devices)} replicas of {threads} threads on {', '.join(devices)}")
    settings = ReplicaSettings(dtype=args.dtype, threads=threads, compile=args.compile)
    return registry, open_replicas(devices, settings, registry.loaded_models())


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
