"""`cornplug doctor`: check the setup of this host.

Each check is a function that yields results. Checks change nothing: they do not start a daemon or create a
secret. Checks of engines are in `engine_checks`.
"""

from __future__ import annotations

import argparse
import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cornplug import config
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.commands import engine_checks, fingerprint
from cornplug.commands.engine_checks import CheckResult
from cornplug.encoder_service.client.engine_encoder import engine_encoder
from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.errors import CheckpointError, ConfigError, EncoderError, EncoderUnavailable, StoreError
from cornplug.private_paths import folder_problem, read_secret, secret_problem
from cornplug.store.arena import choose_store_size, host_memory
from cornplug.store.client import is_host_store, open_store
from cornplug.store.store_stats import StoreStat

_REPLY_TIMEOUT_S = 2.0

ServedModels = tuple[ServedModel, ...]


def main(argv: list[str]) -> int:
    """Run `cornplug doctor`, and return exit status 1 if a check failed, else 0.

    Raises ConfigError if a setting is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="cornplug doctor", description="Check the setup of this host and suggest a fix for each problem."
    )
    parser.add_argument("--model", action="append", default=[], help="checkpoint to check; can be repeated")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="dtype of the engine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    names = [engine.name for engine in engine_checks.ENGINES]
    parser.add_argument(
        "--engine", choices=names, help="engine for which to check --model (default: all installed engines)"
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="flags of the engine that serves the model of --model"
    )
    args = parser.parse_args(argv)
    engines = engine_checks.installed_engines(args.engine)
    if args.flags and not args.model:
        parser.error("FLAGS need --model MODEL")
    if args.flags and len(engines) > 1:
        parser.error("both engines are installed: use --engine to select the engine that has these flags")
    findings = list(run_checks(config.load(), args.model, args.dtype, args.flags, engines))
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        _print(findings)
    return int(any(f.status == "fail" for f in findings))


def run_checks(
    settings: config.Config,
    models: list[str],
    dtype: fingerprint.DType | None = None,
    flags: Sequence[str] = (),
    engines: Sequence[engine_checks.CheckedEngine] = (),
) -> Iterator[CheckResult]:
    """Run all checks in order and yield each result as soon as it is available.

    For each model, this reports what each of `engines` would share if it was started with `flags`, and with
    `dtype` if it is set.
    """
    yield from engine_checks.check_versions()
    yield from engine_checks.check_plugins()
    yield from engine_checks.check_allocator()
    yield from check_secret(settings.store)
    if is_host_store(settings.store):
        yield from check_folder(settings.store)
        yield from check_store(settings.store)
    else:
        yield from check_other_store(settings.store)
    descriptions = [(one, describe_encoder(one)) for one in settings_by_encoder(settings)]
    for one, description in descriptions:
        yield from check_encoder(one.encoder, description)
    tuples = [description for _, description in descriptions if isinstance(description, tuple)]
    described = tuple(model for found in tuples for model in found) if tuples else descriptions[0][1]
    flags = [*(("--dtype", dtype) if dtype else ()), *flags]
    for model in models:
        for engine in engines:
            yield from engine_checks.check_sharing(engine, model, flags)
        yield from check_model(model, dtype, described)


def check_secret(settings: config.StoreConfig) -> Iterator[CheckResult]:
    """Check that the secret file has 32 bytes and that other users cannot read it."""
    path = settings.secret_file
    try:
        about = path.stat()
    except FileNotFoundError:
        yield CheckResult("ok", "secret", f"{path}: does not exist yet, is created on first use")
        return
    except OSError as e:
        yield CheckResult(
            "fail", "secret", f"{path}: {e.strerror}", "Set store.secret_file to a file that belongs to you."
        )
        return
    if about.st_size != 32:
        remedy = f"Remove it, or run: head -c 32 /dev/urandom > {path}"
        yield CheckResult("fail", "secret", f"{path} has {about.st_size} bytes instead of 32", remedy)
    elif problem := secret_problem(about):
        remedy = f"chmod 600 {path}. Replace the secret if other users may have read it."
        yield CheckResult("fail", "secret", f"{path} {problem}", remedy)
    else:
        yield CheckResult("ok", "secret", f"{path}, mode {about.st_mode & 0o777:03o}")


def check_store(settings: config.StoreConfig) -> Iterator[CheckResult]:
    """Check that the host's store responds, or that this host has enough memory to start a store."""
    now = query_store(settings)
    if not isinstance(now, StoreStat):
        start = f"cornplug serve-store --socket {settings.socket}"
        yield CheckResult(
            "warn" if settings.autostart else "fail",
            "store",
            f"{settings.socket}: {now}",
            f"The first engine will start a store. To start it now: {start}"
            if settings.autostart
            else f"Start a store: {start}",
        )
        yield from check_shared_memory(settings)
        return
    size = f"{now.capacity_bytes} bytes, {size_source(settings, now.capacity_bytes)}"
    yield CheckResult("ok", "store", f"{settings.socket}: {_format_usage(now)}; {size}")


def check_other_store(settings: config.StoreConfig) -> Iterator[CheckResult]:
    """Check that a store from another package responds."""
    now = query_store(settings)
    if isinstance(now, StoreStat):
        yield CheckResult("ok", "store", f"{settings.backend}: {_format_usage(now)}")
    else:
        remedy = "Start it, or set CORNPLUG_STORE_BACKEND=pool to use the host's store."
        yield CheckResult("fail", "store", f"{settings.backend}: {now}", remedy)


def _format_usage(now: StoreStat) -> str:
    used = f"{_format_mib(now.used_bytes)} of {_format_mib(now.capacity_bytes)} used, {now.entries} entries"
    return f"{used}, {now.hits} hits, {now.misses} misses"


def query_store(settings: config.StoreConfig) -> StoreStat | str:
    """Return the store's statistics, or the reason why it does not respond."""
    if is_host_store(settings) and not settings.secret_file.exists():
        # Creating a client would create a secret.
        return "no store has run here, because there is no secret yet"
    try:
        client = open_store(settings, autostart=False, connect_timeout_s=_REPLY_TIMEOUT_S)
    except ConfigError as e:
        return str(e)
    try:
        return client.stat(deadline_s=_REPLY_TIMEOUT_S)
    except StoreError as e:
        return str(e)
    finally:
        client.close()


def size_source(settings: config.StoreConfig, capacity_bytes: int) -> str:
    """Return an explanation for the size of a running store."""
    if settings.size_bytes is None:
        return "by default a quarter of the memory that was left when it started"
    if settings.size_bytes == capacity_bytes:
        return "as set by store.size_bytes"
    return (
        f"store.size_bytes is {settings.size_bytes}, but the store was started with another value or with "
        "less memory"
    )


def check_shared_memory(settings: config.StoreConfig) -> Iterator[CheckResult]:
    """Check that this host has enough memory for a store of the configured size."""
    memory = host_memory()
    what = f"{memory.limit_name} has {_format_mib(memory.available_bytes)} left"
    try:
        size_bytes = choose_store_size(settings.size_bytes, clamp=False, memory=memory)
    except ConfigError as e:
        yield CheckResult("warn", "shared memory", f"{what}; {e}", "Reduce CORNPLUG_STORE_SIZE_BYTES.")
        return
    source = "a quarter of that" if settings.size_bytes is None else "as set by store.size_bytes"
    yield CheckResult("ok", "shared memory", f"{what}; a store would have {size_bytes} bytes, {source}")


def check_folder(settings: config.StoreConfig) -> Iterator[CheckResult]:
    """Check that only this user can write to the socket's folder."""
    path = settings.socket.parent
    remedy = "Use a folder that belongs to you, with mode 0700: CORNPLUG_STORE_SOCKET=FOLDER/store.sock"
    try:
        about = path.lstat()
    except FileNotFoundError:
        yield CheckResult("ok", "folder", f"{path}: does not exist yet, is created on first use (mode 700)")
        return
    except OSError as e:
        yield CheckResult("fail", "folder", f"{path}: {e.strerror}", remedy)
        return
    around = path.parent.stat()
    problem = "is a symbolic link" if path.is_symlink() else folder_problem(about)
    if problem:
        yield CheckResult("fail", "folder", f"{path} {problem}", remedy)
    elif around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX:
        what = (
            f"other users can rename {path}, because they can write to {path.parent}: they can stop sharing, "
            "but not read or change entries"
        )
        yield CheckResult("warn", "folder", what, f"chmod +t {path.parent}")
    else:
        yield CheckResult("ok", "folder", f"{path}, mode {about.st_mode & 0o777:03o}")


def settings_by_encoder(settings: config.Config) -> list[config.Config]:
    """Return a copy of the settings for each encoder service that engines use. Each copy has only that
    service."""
    return [
        settings.model_copy(update={"encoder": settings.encoder.model_copy(update={"engine_urls": (url,)})})
        for url in settings.encoder.engine_urls
    ] or [settings]


def describe_encoder(settings: config.Config) -> ServedModels | EncoderError:
    """Return the models that the encoder service serves, or the error if it does not respond."""
    if not settings.store.secret_file.exists():  # Reading the file would create a secret.
        return EncoderUnavailable(
            "no service has run here, because there is no secret yet", reason="encoder_down"
        )
    try:
        client = engine_encoder(settings, read_secret(settings.store.secret_file))
    except ConfigError as e:
        return EncoderUnavailable(str(e), reason="config")
    try:
        return client.describe(deadline_s=_REPLY_TIMEOUT_S)
    except EncoderError as e:
        return e
    finally:
        client.close()


def check_encoder(
    settings: config.EncoderConfig, described: ServedModels | EncoderError
) -> Iterator[CheckResult]:
    """Report whether an encoder service responds and which models it serves."""
    where = ", ".join(settings.engine_urls) or str(settings.socket)
    if isinstance(described, tuple):
        names = ", ".join(f"{m.name} ({m.dtype})" for m in described)
        yield CheckResult("ok", "encoder", f"{where}: serves {names or 'nothing'}")
    elif settings.engine_urls and described.reason == "config":
        yield CheckResult(
            "fail", "encoder", f"{where}: {described}", "Engines do not start with this setting."
        )
    else:
        remedy = "Engines use their own towers. To share a tower, run: cornplug encoder --model DIR"
        yield CheckResult("warn", "encoder", f"{where}: {described}", remedy)


def check_model(
    model: str, dtype: fingerprint.DType | None, described: ServedModels | EncoderError
) -> Iterator[CheckResult]:
    """Check that a checkpoint's fingerprints can be computed, and that an encoder service serves its
    identity."""
    try:
        report = fingerprint.describe(model, dtype)
    except CheckpointError as e:
        yield CheckResult(
            "fail",
            model,
            str(e),
            "Use a folder with config.json and safetensors, or download the model.",
        )
        return
    if report["identity"] is None:
        kind = Checkpoint.open(model).config.get("model_type")
        yield CheckResult("ok", "model", f"{model}: {kind}, has no tower that the encoder service can serve")
        return
    yield CheckResult(
        "ok", "model", f"{model}: {report['family']}, {report['dtype']}, identity {report['identity'][:16]}"
    )
    if not isinstance(described, tuple):
        return
    if any(m.identity.hex() == report["identity"] for m in described):
        yield CheckResult("ok", "model", f"{model}: the encoder serves this identity")
        return
    near = [m for m in described if m.tower_fp.hex() == report["tower"]]
    why = (
        f"It has the same tower as {near[0].name} ({near[0].dtype}), but another projector, settings or dtype"
        if near
        else ""
    )
    yield CheckResult(
        "warn",
        "model",
        f"{model}: the encoder does not serve this identity. {why}".rstrip(" ."),
        f"Add it: cornplug encoder --model {model} --dtype {report['dtype']}",
    )


def _format_mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _print(findings: list[CheckResult]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}
    for f in findings:
        remedy = f"\n[bold]→[/] {escape(f.remedy)}" if f.remedy else ""
        table.add_row(f"[{colour[f.status]}]{f.status}[/]", escape(f.check), escape(f.what) + remedy)
    Console().print(table)
