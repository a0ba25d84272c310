"""Time to first token of a fresh SGLang for prompts that vLLM has prefilled, and the other way.

    python benchmarks/cross_engine.py [--quick] [--out DIR]

One engine with cornplug answers prompts of about 1,500 tokens, half of them with an image,
and is stopped. Then a fresh stock engine and a fresh cornplug engine of the other kind get
the same prefixes with a new last question, in turns. Beside them the alternatives: for
SGLang its own file storage, for vLLM LMCache's cross-engine example (script/site lmcache).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from driver import models
from driver.lmcache import Lmcache
from driver.requests import Request, images, words
from driver.stage import SGLANG, VLLM, Stage, hits, options, stage
from driver.table import Report, Row

from devkit.engines import EngineServer, VllmServer
from devkit.sglang_engine import SglangServer

TARGET = 0.3
_LLM = {"hidden_size": 1024, "layers": 8, "heads": 16}
_VISION = {"depth": 12, "embed_dim": 640, "num_heads": 8, "mlp_ratio": 4}
_IMAGE_TOKENS = 256
_PREFIX_TOKENS = 1500
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
# HiCache's host pool is twice the device's: 100 KB a token, three times.
_SGLANG_FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "8192", "--mem-fraction-static", "0.3"),
    *("--chunked-prefill-size", "2048"),
)
WITH_IMAGE, TEXT_ONLY = "prefix with an image", "prefix of text"

Asked = Sequence[tuple[str, Request]]


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers = 4 if chosen.quick else _LLM["layers"]
    report = Report(
        name="cross_engine",
        title="A 1.5k-token prefix that the other engine has prefilled: time to first token",
        engine="engine",
        quick=chosen.quick,
        set_up=[
            f"Qwen2-VL: LLM of {layers} layers of 1024 (16 heads of 64), tower of 12 layers of 640 with "
            f"{_IMAGE_TOKENS} rows an image, float32, random weights.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens, then a last question that no engine has seen.",
            "The engine that served them first, of the other kind, saved each prompt at once "
            "(`--cornplug-save always`) and was stopped before the two measured engines started.",
            "Stock and cornplug: same checkpoint and flags, prefix caching and encoder cache on, both fresh, "
            "warmed up with the same unrelated prompts, asked in turns.",
            "No encoder service: a prefix whose KV is found needs no embedding.",
        ],
    )
    model = models.qwen2_vl(**{**_LLM, "layers": layers}, vision=_VISION, max_pixels=28 * 28 * _IMAGE_TOKENS)
    count = 2 if chosen.quick else 3
    with stage(flags=_FLAGS, kv_gib=2, sglang_flags=_SGLANG_FLAGS) as here, here.store("6GiB"):
        measure(report, here, model, VLLM, SGLANG, prefixes(count, 0), Files(here, model))
        with lmcache(here) as server:
            chunks = Chunks(here, model, server) if server is not None else None
            measure(report, here, model, SGLANG, VLLM, prefixes(count, 1), chunks)
    if chunks is None:
        report.facts["baseline, LMCache"] = "not in this run (script/site lmcache, CORNPLUG_BENCH_LMCACHE=1)"
    report.show()
    report.write(chosen.out)
    return 0


@contextmanager
def lmcache(here: Stage) -> Iterator[Lmcache | None]:
    """Its server, None where it is not asked for: beside vLLM's CPU build it has stopped answering."""
    if os.environ.get("CORNPLUG_BENCH_LMCACHE") != "1":
        yield None
        return
    with Lmcache(here.folder, size_gb=4) as server:
        yield server


def prefixes(count: int, seed: int) -> tuple[list[Request], Asked]:
    """Two requests to warm up with, and `count` of each kind; others for each seed."""
    seen = islice(images(448), seed * (count + 1), None)
    text_tokens, at = _PREFIX_TOKENS - _IMAGE_TOKENS, 1000 * seed
    warm = [
        Request(words(text_tokens, at + 900), (next(seen),)),
        Request(words(_PREFIX_TOKENS, at + 901)),
    ]
    asked = []
    for i, image in enumerate(islice(seen, count)):
        asked.append((WITH_IMAGE, Request(words(text_tokens, at + i), (image,))))
        asked.append((TEXT_ONLY, Request(words(_PREFIX_TOKENS, at + 100 + i))))
    return warm, asked


class Files:
    """SGLang's own file storage. No other engine can write to it: an SGLang warms it."""

    name = "SGLang's own file storage, warmed by SGLang"
    kinds = (WITH_IMAGE, TEXT_ONLY)

    def __init__(self, here: Stage, model: Path) -> None:
        self._here, self._model = here, model
        self._folder = here.folder / "hicache-files"
        self._folder.mkdir()

    def writer(self) -> SglangServer:
        return self.reader()

    def reader(self) -> SglangServer:
        return SglangServer(
            self._model, *_SGLANG_FLAGS, "--page-size", "64", "--enable-hierarchical-cache",
            "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct",
            "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
            log=self._here.folder / "files.log", ready_s=600,
            env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._folder)},
        )  # fmt: skip


class Chunks:
    """LMCache's cross-engine example: SGLang writes, vLLM reads, text only."""

    name = "LMCache 0.5.6, SGLang to vLLM"
    kinds = (TEXT_ONLY,)

    def __init__(self, here: Stage, model: Path, server: Lmcache) -> None:
        self._here, self._model, self._server = here, model, server

    def writer(self) -> SglangServer:
        return self._server.sglang(
            self._model, *_SGLANG_FLAGS, log=self._here.folder / "lmcache-sglang.log", ready_s=600
        )

    def reader(self) -> VllmServer:
        return self._server.vllm(
            self._model, *_FLAGS, log=self._here.folder / "lmcache-vllm.log", env=self._here.env, ready_s=600
        )


Baseline = Files | Chunks


def measure(
    report: Report,
    here: Stage,
    model: Path,
    first: str,
    then: str,
    work: tuple[list[Request], Asked],
    baseline: Baseline | None,
) -> None:
    """Add the rows of `then` reading the pages of `first`."""
    warm, asked = work
    with here.cornplug(model, f"{first}-writes", first, "--cornplug-save", "always") as writer:
        for _, request in asked:
            request.then("who is this").ask(writer)
        hits(writer, "kv_page")  # two more steps: saved pages are committed
    if baseline is not None:
        with baseline.writer() as own:
            for kind, request in asked:
                if kind in baseline.kinds:
                    request.then("who is this").ask(own)
    ttft: dict[str, tuple[list[float], list[float], list[float]]] = {
        kind: ([], [], []) for kind in (WITH_IMAGE, TEXT_ONLY)
    }
    tokens, equal = 0, 0
    with here.pair(model, f"{then}-reads", then) as pair, ExitStack() as stack:
        sides: list[EngineServer] = [pair.stock, pair.cornplug]
        if baseline is not None:
            sides.append(stack.enter_context(baseline.reader()))
        for request in warm:
            for server in sides:
                request.ask(server)
        saved_before = int(pair.cornplug.metric("cornplug_saved_tokens_total"))
        for i, (kind, request) in enumerate(asked):
            question = request.then("what happens next")
            turns = range(len(sides)) if baseline is not None and kind in baseline.kinds else range(2)
            answers = {}
            for j in turns if i % 2 == 0 else reversed(turns):
                answers[j] = question.ask(sides[j])
                ttft[kind][j].append(answers[j].ttft_s)
            tokens += answers[0].prompt_tokens
            equal += answers[0].token_ids == answers[1].token_ids
        hits(pair.cornplug, "kv_page")
        saved = int(pair.cornplug.metric("cornplug_saved_tokens_total")) - saved_before
    if saved < 0.85 * tokens:
        raise SystemExit(f"{saved} of {tokens} prompt tokens came from the store: no fair measurement")
    direction = f"{first} to {then}"
    for kind, (stock, shared, others) in ttft.items():
        report.rows.append(
            Row(name=f"{direction}: {kind}", unit="s", stock=stock, cornplug=shared, target=TARGET)
        )
        if baseline is not None and others:
            ratio = np.median(np.asarray(others) / np.asarray(stock))
            report.facts[f"baseline, {baseline.name}, {kind}"] = (
                f"{np.median(others):.3f} s, {ratio:.3f} of stock"
            )
    report.facts[f"{direction}: prompt tokens from the store"] = f"{saved} of {tokens}"
    report.facts[f"{direction}: answers equal on both sides, token by token"] = f"{equal} of {len(asked)}"


if __name__ == "__main__":
    sys.exit(main())
