"""Time to first token of a fresh SGLang for prompts that vLLM has prefilled, and the other way.

    python benchmarks/cross_engine.py [--quick] [--out DIR]

One engine with cornplug answers prompts of about 1,500 tokens, half of them with a picture,
and is stopped. Then a fresh stock engine and a fresh cornplug engine of the other kind get
the same prefixes with a new last question, in turns. Beside them, for SGLang, its own file
storage: warmed by an SGLang, for no other engine can write to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
from driver import models
from driver.requests import Request, pictures, words
from driver.stage import SGLANG, VLLM, Stage, hits, options, stage
from driver.table import Report, Row

from cornplug.testing.engines import EngineServer
from cornplug.testing.sglang_engine import SglangServer

TARGET = 0.3
_LLM = {"hidden_size": 1024, "layers": 16, "heads": 16}
_VISION = {"depth": 12, "embed_dim": 640, "num_heads": 8, "mlp_ratio": 4}
_PICTURE_TOKENS = 256
_PREFIX_TOKENS = 1500
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
_SGLANG_FLAGS = ("--dtype", "float32", "--max-total-tokens", "40000", "--chunked-prefill-size", "2048")
WITH_PICTURE, TEXT_ONLY = "prefix with a picture", "prefix of text"

Asked = Sequence[tuple[str, Request]]


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers = 6 if chosen.quick else _LLM["layers"]
    report = Report(
        name="cross_engine",
        title="A 1.5k-token prefix that the other engine has prefilled: time to first token",
        engine="engine",
        quick=chosen.quick,
        set_up=[
            f"Qwen2-VL: LLM of {layers} layers of 1024 (16 heads of 64), tower of 12 layers of 640 with "
            f"{_PICTURE_TOKENS} rows a picture, float32, random weights.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens, then a last question that no engine has seen.",
            "The engine that served them first, of the other kind, was stopped before the two measured "
            "engines started.",
            "Stock and cornplug: same checkpoint and flags, prefix caching and encoder cache on, both fresh, "
            "warmed up with the same unrelated prompts, asked in turns.",
            "No encoder service: a prefix whose KV is found needs no embedding.",
        ],
    )
    model = models.qwen2_vl(
        **{**_LLM, "layers": layers}, vision=_VISION, max_pixels=28 * 28 * _PICTURE_TOKENS
    )
    count = 2 if chosen.quick else 6
    with stage(flags=_FLAGS, kv_gib=2, sglang_flags=_SGLANG_FLAGS) as here, here.store("6GiB"):
        measure(report, here, model, VLLM, SGLANG, prefixes(count, 0))
        measure(report, here, model, SGLANG, VLLM, prefixes(count, 1))
    report.show()
    report.write(chosen.out)
    return 0


def prefixes(count: int, seed: int) -> tuple[list[Request], Asked]:
    """Two requests to warm up with, and `count` of each kind; others for each seed."""
    seen = islice(pictures(448), seed * (count + 1), None)
    text_tokens, at = _PREFIX_TOKENS - _PICTURE_TOKENS, 1000 * seed
    warm = [
        Request(words(text_tokens, at + 900), (next(seen),)),
        Request(words(_PREFIX_TOKENS, at + 901)),
    ]
    asked = []
    for i, picture in enumerate(islice(seen, count)):
        asked.append((WITH_PICTURE, Request(words(text_tokens, at + i), (picture,))))
        asked.append((TEXT_ONLY, Request(words(_PREFIX_TOKENS, at + 100 + i))))
    return warm, asked


def with_question(request: Request, question: str) -> Request:
    """The same prefix and another end."""
    return Request(f"{request.prompt} {question}?", request.images)


def measure(
    report: Report, here: Stage, model: Path, first: str, then: str, work: tuple[list[Request], Asked]
) -> None:
    """Add the rows of `then` reading what `first` has written."""
    warm, asked = work
    with here.cornplug(model, f"{first}-writes", first) as writer:
        for _, request in asked:
            with_question(request, "who is this").ask(writer)
        hits(writer, "kv_page")  # two more steps: what was saved is committed
    files = here.folder / "hicache-files"
    if then == SGLANG:
        with file_backend(here, model, files) as own:
            for _, request in asked:
                with_question(request, "who is this").ask(own)
    ttft: dict[str, tuple[list[float], list[float], list[float]]] = {
        kind: ([], [], []) for kind in (WITH_PICTURE, TEXT_ONLY)
    }
    tokens, equal = 0, 0
    with here.pair(model, f"{then}-reads", then) as pair, ExitStack() as stack:
        sides: list[EngineServer] = [pair.stock, pair.cornplug]
        if then == SGLANG:
            sides.append(stack.enter_context(file_backend(here, model, files)))
        for request in warm:
            for server in sides:
                request.ask(server)
        saved_before = int(pair.cornplug.metric("cornplug_saved_tokens_total"))
        for i, (kind, request) in enumerate(asked):
            question = with_question(request, "what happens next")
            answers = [None] * len(sides)
            for j in range(len(sides)) if i % 2 == 0 else reversed(range(len(sides))):
                answers[j] = question.ask(sides[j])
                ttft[kind][j].append(answers[j].ttft_s)
            tokens += answers[0].prompt_tokens
            equal += answers[0].token_ids == answers[1].token_ids
        hits(pair.cornplug, "kv_page")
        saved = int(pair.cornplug.metric("cornplug_saved_tokens_total")) - saved_before
    if saved < 0.85 * tokens:
        raise SystemExit(f"{saved} of {tokens} prompt tokens came from the store: no fair measurement")
    direction = f"{first} to {then}"
    for kind, (stock, shared, files_s) in ttft.items():
        report.rows.append(
            Row(name=f"{direction}: {kind}", unit="s", stock=stock, cornplug=shared, target=TARGET)
        )
        if files_s:
            ratio = np.median(np.asarray(files_s) / np.asarray(stock))
            report.facts[f"SGLang's own file storage, warmed by SGLang, {kind}"] = (
                f"{np.median(files_s):.3f} s, {ratio:.3f} of stock"
            )
    report.facts[f"{direction}: prompt tokens from the store"] = f"{saved} of {tokens}"
    report.facts[f"{direction}: answers equal on both sides, token by token"] = f"{equal} of {len(asked)}"


def file_backend(here: Stage, model: Path, folder: Path) -> SglangServer:
    """SGLang with HiCache on its own file storage."""
    folder.mkdir(exist_ok=True)
    return SglangServer(
        model, *here.sglang_flags, "--page-size", "64", "--enable-hierarchical-cache",
        "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct",
        "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
        log=here.folder / f"files-{len(list(here.folder.iterdir()))}.log",
        env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}, ready_s=600,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
