"""Time to first token of a second app that asks about an image another app has asked about.

    python benchmarks/second_app.py [--quick] [--out DIR]

Two LLaVA models with different language models and one CLIP-L/336 tower. App A (through the
encoder service and the store) asks about every image and is stopped. Then app B's engine
and a stock engine of the same model, both of which have never seen them, ask in turns.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from driver import models
from driver.requests import Request, images, words
from driver.stage import Idle, Stage, hits, options, stage
from driver.table import Report, Row

from devkit.checkpoints import CLIP_L_336

TARGET = 0.35
_LLM = {"hidden_size": 256, "layers": 4, "heads": 4}
_FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4")


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    report = Report(
        name="second_app",
        title="Second app, same image: time to first token",
        quick=chosen.quick,
        set_up=[
            "Tower: CLIP-L/336 (24 layers of 1024, 577 positions), float32, random weights.",
            "Language models: 4 layers of 256, deliberately small, so that the tower dominates as it "
            "does when a question is short.",
            "App A asked about every image through the encoder service and was stopped before B started.",
            "B with cornplug and B on stock vLLM: same checkpoint and flags, prefix caching and encoder "
            "cache on, warmed up with two other images, asked in turns; the other one idles meanwhile.",
        ],
    )
    model_a, model_b = (models.llava(**_LLM, vision=dict(CLIP_L_336), llm_seed=seed) for seed in (1, 2))
    count = 5 if chosen.quick else 20
    with (
        stage(flags=_FLAGS, kv_gib=1) as here,
        here.store("512MiB"),
        here.encoder(model_a, model_b) as encoder,
    ):
        measure(report, here, model_a, model_b, count)
        passes = int(encoder_passes(encoder.url))
    report.facts["tower passes of the encoder service"] = passes
    report.show()
    report.write(chosen.out)
    return 0


def measure(report: Report, here: Stage, model_a: Path, model_b: Path, count: int) -> None:
    """Fill `report` with `count` images' figures."""
    seen = images(336)
    warm = list(islice(seen, 2))
    asked = list(islice(seen, count))
    with here.cornplug(model_a, "app-a") as first:
        for i, image in enumerate(asked):
            Request(f"describe this {words(8, i)}", (image,)).ask(first)
    stock, shared, equal = [], [], 0
    with here.pair(model_b, "app-b") as pair:
        idle = Idle(pair)
        for i, image in enumerate(warm):
            for server in (pair.stock, pair.cornplug):
                Request(f"warm up {words(24, 900 + i)}", (image,)).ask(server)
        before = hits(pair.cornplug, "embedding")
        for i, image in enumerate(asked):
            question = Request(f"what is here {words(24, 100 + i)}", (image,))
            answers = {}
            for server, other in zip(pair.in_turn(i), reversed(pair.in_turn(i)), strict=True):
                with idle.watch(other):
                    answers[server] = question.ask(server)
            stock.append(answers[pair.stock].ttft_s)
            shared.append(answers[pair.cornplug].ttft_s)
            equal += answers[pair.stock].token_ids == answers[pair.cornplug].token_ids
        found = hits(pair.cornplug, "embedding") - before
    if found.total() != count:
        raise SystemExit(f"of {count} images B got {dict(found)}: this measured something else")
    report.rows.append(Row(name="TTFT, new question", unit="s", stock=stock, cornplug=shared, target=TARGET))
    report.facts["where B's embeddings came from"] = ", ".join(f"{k} {n}" for k, n in found.items())
    report.facts["answers equal on both sides, token by token"] = f"{equal} of {count}"
    report.facts["used by the engine that waits"] = str(idle)


def encoder_passes(url: str) -> float:
    """Tower passes that the service at `url` has run."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "cornplug_encoder_tower_passes_total"
    )


if __name__ == "__main__":
    sys.exit(main())
