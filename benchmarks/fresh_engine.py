"""Time to first token of a freshly started engine for prompts that another engine has served.

    python benchmarks/fresh_engine.py [--quick] [--out DIR]

An engine with cornplug answers prompts of about 1,500 tokens, half of them with an image,
and is stopped. Then a fresh engine with cornplug and a fresh stock engine get the same
prefixes with a new last question, in turns.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from driver import models
from driver.requests import Request, images, words
from driver.stage import VLLM, Idle, Stage, hits, options, stage
from driver.table import Report, Row

from devkit.checkpoints import CLIP_L_336

TARGET = 0.25
_LLM = {"hidden_size": 1024, "layers": 16, "heads": 16}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
_PREFIX_TOKENS = 1500
_IMAGE_TOKENS = 576
WITH_IMAGE, TEXT_ONLY = "TTFT, prefix with an image", "TTFT, prefix of text"


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers = 8 if chosen.quick else _LLM["layers"]
    report = Report(
        name="fresh_engine",
        title="Fresh engine, same 1.5k-token prefix: time to first token",
        quick=chosen.quick,
        set_up=[
            f"LLaVA: Llama of {layers} layers of 1024 (16 heads of 64, 16 KV heads), CLIP-L/336 tower, "
            "float32, random weights.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens (an image is {_IMAGE_TOKENS} of them), then a "
            "last question that no engine has seen.",
            "The engine that served them first saved each prompt at once (`--cornplug-save always`) and was "
            "stopped before the two measured engines started.",
            "Stock and cornplug: same checkpoint and flags, prefix caching and encoder cache on, both fresh, "
            "warmed up with the same unrelated prompts, asked in turns; the other one idles meanwhile.",
            "No encoder service: a prefix whose KV is found needs no embedding.",
        ],
    )
    model = models.llava(**{**_LLM, "layers": layers}, vision=dict(CLIP_L_336))
    count = 2 if chosen.quick else 6
    with stage(flags=_FLAGS, kv_gib=3) as here, here.store("6GiB"):
        measure(report, here, model, count)
    report.show()
    report.write(chosen.out)
    return 0


def prefixes(count: int) -> tuple[list[Request], list[tuple[str, Request]]]:
    """Two requests to warm up with, and `count` of each kind named by their row."""
    seen = images(336)
    text_tokens = _PREFIX_TOKENS - _IMAGE_TOKENS
    warm = [
        Request(words(text_tokens, 900), (next(seen),)),
        Request(words(_PREFIX_TOKENS, 901)),
    ]
    asked = []
    for i, image in enumerate(islice(seen, count)):
        asked.append((WITH_IMAGE, Request(words(text_tokens, i), (image,))))
        asked.append((TEXT_ONLY, Request(words(_PREFIX_TOKENS, 100 + i))))
    return warm, asked


def measure(report: Report, here: Stage, model: Path, count: int) -> None:
    """Fill `report` with `count` prefixes of each kind."""
    warm, asked = prefixes(count)
    with here.cornplug(model, "first", VLLM, "--cornplug-save", "always") as first:
        for _, request in asked:
            request.then("who is this").ask(first)
        hits(first, "kv_page")  # two more steps: saved pages are committed
    ttft: dict[str, tuple[list[float], list[float]]] = {WITH_IMAGE: ([], []), TEXT_ONLY: ([], [])}
    tokens, equal = [], 0
    with here.pair(model, "second") as pair:
        idle = Idle(pair)
        for request in warm:
            for server in (pair.stock, pair.cornplug):
                request.ask(server)
        before = hits(pair.cornplug, "kv_page")
        for i, (kind, request) in enumerate(asked):
            question = request.then("what happens next")
            answers = {}
            for server, other in zip(pair.in_turn(i), reversed(pair.in_turn(i)), strict=True):
                with idle.watch(other):
                    answers[server] = question.ask(server)
            for side, server in zip(ttft[kind], (pair.stock, pair.cornplug), strict=True):
                side.append(answers[server].ttft_s)
            tokens.append(answers[pair.stock].prompt_tokens)
            equal += answers[pair.stock].token_ids == answers[pair.cornplug].token_ids
        found = (hits(pair.cornplug, "kv_page") - before).total()
        saved = int(pair.cornplug.metric("cornplug_saved_tokens_total"))
    if saved < 0.9 * sum(tokens):
        raise SystemExit(f"{saved} of {sum(tokens)} prompt tokens came from the store: no fair measurement")
    for kind, (stock, shared) in ttft.items():
        report.rows.append(Row(name=kind, unit="s", stock=stock, cornplug=shared, target=TARGET))
    report.facts["prompt tokens"] = f"{min(tokens)} to {max(tokens)}"
    report.facts["prompt tokens from the store"] = f"{saved} of {sum(tokens)}, in {found} pages"
    report.facts["answers equal on both sides, token by token"] = f"{equal} of {len(asked)}"
    report.facts["used by the engine that waits"] = str(idle)


if __name__ == "__main__":
    sys.exit(main())
