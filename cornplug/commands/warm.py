"""`cornplug warm FILE`: load an app's prompts and images into the store before its users arrive.

With `--encoder`, images are sent to the encoder service first. Then each request is sent to the engine with
max_tokens=1. Requests are sent twice if the engine saves a page only when a second request uses it
(`engine.save = "second"`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cornplug import config
from cornplug.commands.warm_engine import LineError, StoreCounts, WarmedEngine, WarmLine, read_warm_file
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.client.sync_client import EncoderClient
from cornplug.encoder_service.formats.messages import DECODINGS, DEFAULT_DECODING, Decoding
from cornplug.errors import ConfigError

_STABLE_S: Final = 1.5
"""Time in seconds without a change after which the engine's counts are considered final."""
_SETTLE_TIMEOUT_S: Final = 15.0
_POLL_INTERVAL_S: Final = 0.5
_EPILOG: Final = """\
FILE has one JSON object per line, as the app sends it to the engine, with the same cache_salt:
  {"messages": [{"role": "system", "content": "..."}]}
  {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "photo.jpg"}}]}]}
  {"prompt": "..."}
  {"images": ["photo.jpg"]}                 to the encoder service only

Images are only found by engines with the same model, preprocessing and dtype. The reported counts include
other requests to the engine during this time."""


@dataclass(slots=True)
class WarmReport:
    """Result of a run of `cornplug warm`."""

    lines: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    images: Counter[str] = field(default_factory=Counter)
    """Number of images whose embeddings the encoder service returned, by origin."""
    errors: list[LineError] = field(default_factory=list)
    counts: StoreCounts | None = None
    """Changes of the engine's counts during the run, or None if the engine does not publish cornplug's
    counters."""

    def failed_lines(self) -> set[int]:
        """Return the line numbers of the lines that failed."""
        return {error.line for error in self.errors}


def main(argv: list[str]) -> int:
    """Run `cornplug warm`, and return exit status 0 if all lines succeeded, else 1.

    Raises ConfigError if the file cannot be read or the engine does not respond.
    """
    args = _parser().parse_args(argv)
    if not (args.engine or args.encoder or args.check):
        _parser().error("--engine, --encoder or both are required")
    try:
        lines, errors = read_warm_file(args.file)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("FILE", f"cannot read {args.file}: {e}", "Use a JSONL file in UTF-8.") from e
    report = WarmReport(lines=len(lines) + len({error.line for error in errors}), errors=errors)
    if not args.check:
        _run(args, lines, report)
    _print_report(args, report)
    if args.failed is not None:
        failed = report.failed_lines()
        texts = [
            raw for n, raw in enumerate(args.file.read_text(encoding="utf-8").split("\n"), 1) if n in failed
        ]
        args.failed.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return 1 if report.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug warm",
        description="Load an app's prompts and images into the store, using a running engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="requests of the app, one JSON object per line"
    )
    parser.add_argument(
        "--engine", metavar="URL", help="vLLM or SGLang server with cornplug: http://HOST:PORT"
    )
    parser.add_argument("--encoder", metavar="URL", help="encoder service to which all images are sent")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model of lines that name no model (default: the engine's first model)",
    )
    parser.add_argument(
        "--decoding", choices=DECODINGS,
        help="decode images as this release of an engine does (default: the release of --engine, or "
        f"{DEFAULT_DECODING})",
    )  # fmt: skip
    parser.add_argument("--app", metavar="NAME", help="app under which the encoder service counts the images")
    parser.add_argument(
        "--concurrency", type=int, default=4, metavar="N", help="concurrent requests (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="timeout of one request in seconds (default: 600)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME",
        help="environment variable with the API key of the engine and the service (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--failed", type=Path, metavar="FILE", help="write failed lines to FILE")
    parser.add_argument(
        "--check", action="store_true", help="read FILE and its images without sending requests"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(args: argparse.Namespace, lines: Sequence[WarmLine], report: WarmReport) -> None:
    key = os.environ.get(args.api_key_env) or None
    engine = None
    if args.engine:
        engine = WarmedEngine(args.engine, model=args.model, api_key=key, timeout_s=args.timeout)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            if args.encoder:
                model = args.model or (engine.model if engine is not None else None)
                decoding = args.decoding or (engine.detect_decoding() if engine is not None else None)
                _send_images(args, lines, report, progress, model, key, decoding)
            if engine is not None:
                _RequestSender(engine, args.concurrency, report, progress).send(lines)
            for line in lines:
                if not line.path and not args.encoder:
                    report.errors.append(LineError(line.number, "images", "requires --encoder"))
                elif line.path and engine is None and not line.images:
                    report.errors.append(LineError(line.number, "", "has no image and requires --engine"))
    finally:
        if engine is not None:
            engine.close()


def _send_images(
    args: argparse.Namespace,
    lines: Sequence[WarmLine],
    report: WarmReport,
    progress: Progress,
    model: str | None,
    key: str | None,
    decoding: Decoding | None,
) -> None:
    """Send the images to the encoder service, grouped by model and salt."""
    groups: dict[tuple[str, str | None], list[tuple[WarmLine, str, bytes]]] = {}
    for line in lines:
        named = line.body.get("model") or model
        for name, data in line.images:
            if isinstance(named, str):
                groups.setdefault((named, line.salt), []).append((line, name, data))
            else:
                report.errors.append(LineError(line.number, "model", "missing: set it here or with --model"))
    task = progress.add_task("images", total=sum(map(len, groups.values())))
    if not groups:
        return
    deadline_s = min(args.timeout, 60.0)
    with EncoderClient(
        args.encoder, api_key=key, app=args.app, deadline_s=deadline_s, decoding=decoding
    ) as client:
        for (named, salt), images in groups.items():
            items = [data for _, _, data in images]
            for index, result in client.encode_many(items, model=named, cache_salt=salt):
                line, name, _ = images[index]
                if isinstance(result, EmbeddingRef):
                    report.images[result.origin] += 1
                else:
                    report.errors.append(LineError(line.number, name, str(result)))
                progress.advance(task)


class _RequestSender:
    """Sends requests to one engine."""

    def __init__(
        self, engine: WarmedEngine, concurrency: int, report: WarmReport, progress: Progress
    ) -> None:
        self._engine, self._concurrency = engine, max(1, concurrency)
        self._report, self._progress = report, progress

    def send(self, lines: Sequence[WarmLine]) -> None:
        """Send each line, and send the lines again if the engine saves pages only at their second request."""
        lines = [line for line in lines if line.path]
        before = self._engine.read_counts()
        done = self._send_lines(lines, "requests", self._record_reply)
        if not done:
            return
        counts = self._wait_for_counts(before, done[0])
        if counts is None or counts.pages["first_sight"]:
            done = self._send_lines(done, "once more", lambda line, tokens: None)
            counts = self._wait_for_counts(before, done[0]) if done else counts
        self._report.counts = counts

    def _record_reply(self, line: WarmLine, tokens: int) -> None:
        self._report.requests += 1
        self._report.prompt_tokens += tokens

    def _send_lines(
        self, lines: Sequence[WarmLine], what: str, on_reply: Callable[[WarmLine, int], None]
    ) -> list[WarmLine]:
        """Send lines and return the lines that succeeded. Errors of the other lines are added to the
        report."""
        task, done = self._progress.add_task(what, total=len(lines)), []
        with ThreadPoolExecutor(self._concurrency) as pool:
            sent = {pool.submit(self._engine.send, line): line for line in lines}
            for future in as_completed(sent):
                line, result = sent[future], future.result()
                if isinstance(result, LineError):
                    self._report.errors.append(result)
                else:
                    on_reply(line, result)
                    done.append(line)
                self._progress.advance(task)
        return done

    def _wait_for_counts(self, before: StoreCounts | None, line: WarmLine) -> StoreCounts | None:
        """Wait until the engine's counts stop changing, and return their changes since `before`.

        This is necessary because an engine also saves pages after it has returned a response.
        """
        if before is None:
            return None
        counts, changed_s = before, time.monotonic()
        end_s = changed_s + _SETTLE_TIMEOUT_S
        while time.monotonic() < min(end_s, changed_s + _STABLE_S):
            # Send a prompt that is already in the engine's own cache, because an engine publishes its counts
            # only in later steps.
            self._engine.send(line)
            now = self._engine.read_counts()
            if now is not None and now != counts:
                counts, changed_s = now, time.monotonic()
            time.sleep(_POLL_INTERVAL_S)
        return counts.since(before)


def _print_report(args: argparse.Namespace, report: WarmReport) -> None:
    for error in sorted(report.errors, key=lambda one: one.line):
        print(error, file=sys.stderr)
    page_tokens = config.load().engine.page_tokens
    if args.json:
        print(json.dumps(_as_json(report, page_tokens)))
        return
    table = Table("", "", show_header=False)
    for name, value in _rows(args, report, page_tokens):
        table.add_row(name, escape(value))
    Console().print(table)


def _rows(args: argparse.Namespace, report: WarmReport, page_tokens: int) -> Iterator[tuple[str, str]]:
    left = len(report.failed_lines())
    yield "lines", f"{report.lines}, of which {left} failed" if left else f"{report.lines}"
    if args.check:
        return
    yield "requests", f"{report.requests} with {report.prompt_tokens} prompt tokens"
    if (counts := report.counts) is not None:
        stored, there = counts.pages["stored"], counts.pages["present"]
        size = f"{counts.saved_bytes / (1 << 20):.1f} MiB"
        yield "stored", f"{stored * page_tokens} tokens ({stored} pages of {page_tokens}, {size})"
        loaded = counts.loaded_tokens
        yield "already stored", f"{loaded + there * page_tokens} tokens, of which the engine loaded {loaded}"
        yield "not stored", _format_outcomes(counts.pages) or "none"
        embeddings = counts.embeddings
        yield "images (engine)", f"{embeddings['stored']} stored, {counts.embedding_hits} cache hits"
    elif report.requests:
        yield "stored", "unknown: the engine has no metrics of cornplug at /metrics"
    if args.encoder:
        cached = report.images["cached"]
        yield "images (service)", f"{report.images.total() - cached} encoded, {cached} already stored"


def _format_outcomes(pages: Counter[str]) -> str:
    """Return a text with the numbers of pages that were offered but not stored, by outcome."""
    known = {"stored", "present", "first_sight"}
    return ", ".join(f"{count} pages {name}" for name, count in sorted(pages.items()) if name not in known)


def _as_json(report: WarmReport, page_tokens: int) -> dict[str, Any]:
    counts = report.counts
    return {
        "lines": report.lines,
        "requests": report.requests,
        "prompt_tokens": report.prompt_tokens,
        "page_tokens": page_tokens,
        "pages": None if counts is None else dict(counts.pages),
        "loaded_tokens": None if counts is None else counts.loaded_tokens,
        "saved_bytes": None if counts is None else counts.saved_bytes,
        "images": dict(report.images),
        "errors": [
            {"line": error.line, "field": error.field, "problem": error.problem} for error in report.errors
        ],
    }
