"""Time to first token of a request with eight images, with and without prefill while encoding.

    python benchmarks/prefill_while_encoding.py [--quick] [--out DIR]

Two vLLM engines with cornplug share one encoder service. In one of them, injected code turns prefill while
encoding off. Each engine is kept to one core, and the service to another. Both get the same images, in turns,
under cache salts of their own: the service encodes each image for each of them.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from driver import models
from driver.cores import pin
from driver.requests import images, words
from driver.stage import hits, options, stage
from driver.table import Report, Row

from devkit.engines import Answer, EngineServer
from devkit.injected_code import injected_environment

TARGET = 0.75
TEXT_TARGET = 1.03
_IMAGES, _ROWS, _EDGE = 8, 256, 448
_LLM = {"hidden_size": 1024, "layers": 3, "heads": 16}
_VISION = {"depth": 3, "embed_dim": 640, "num_heads": 8, "mlp_ratio": 4}
_FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "8")
_OFF = """
def change(module):
    module.why_not = lambda config: "this benchmark turns it off"
"""
_TEXTS, _EVERY_S = 8, 1.5


@dataclass(frozen=True, slots=True)
class Engines:
    """Both engines; what they say of themselves is equal but for what is injected."""

    off: EngineServer
    on: EngineServer

    def in_turn(self, i: int) -> tuple[EngineServer, EngineServer]:
        return (self.off, self.on) if i % 2 == 0 else (self.on, self.off)


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    engine_core, service_core = sorted(os.sched_getaffinity(0))[:2]
    report = Report(
        name="prefill_while_encoding",
        title="Eight images, encoder and LLM on a core each: prefill while encoding",
        quick=chosen.quick,
        sides=("cornplug, off", "cornplug, on"),
        set_up=[
            f"Qwen2-VL: LLM of {_LLM['layers']} layers of {_LLM['hidden_size']}, tower of {_VISION['depth']} "
            f"layers of {_VISION['embed_dim']}, about {_ROWS} rows an image, float32, random weights.",
            f"{_IMAGES} images that nobody has seen, then 20 tokens of text; both engines get the same ones, "
            "in turns, under salts of their own. The engines live on one core, the service on another one.",
            "Texts alone: 100 tokens, 16 tokens answered. Texts meanwhile: one every "
            f"{_EVERY_S:g} s, {_TEXTS} of them, from the moment on at which the request with images is sent.",
        ],
    )
    with stage(flags=_FLAGS, kv_gib=2) as here, here.store("2GiB"), ExitStack() as running:
        # One thread a process: more would wait for each other on its core.
        here.env |= {"OMP_NUM_THREADS": "1", "CORNPLUG_STORE_LOAD_WHEN": "always"}
        # Both sides get the same texts: the second one would load pages of the first.
        here.env["CORNPLUG_ENGINE_SHARE_KV"] = "false"
        checkpoint = models.qwen2_vl(**_LLM, vision=_VISION, max_pixels=28 * 28 * _ROWS)
        service = running.enter_context(here.encoder(checkpoint))
        pin(service.pids(), [service_core])
        sides = []
        plain, into = dict(here.env), "cornplug.vllm_connector.media.early_prefill"
        for name in ("off", "on"):
            here.env = plain | (injected_environment(here.folder, _OFF, into=into) if name == "off" else {})
            sides.append(running.enter_context(here.cornplug(checkpoint, name)))
            pin(sides[-1].pids(), [engine_core])
        measure(report, Engines(*sides), 3 if chosen.quick else 10)
    report.show()
    report.write(chosen.out)
    return 0


def measure(report: Report, engines: Engines, rounds: int) -> None:
    """Fill `report`."""
    new, seeds = images(_EDGE), count()
    first: dict[EngineServer, list[float]] = {engines.off: [], engines.on: []}
    alone: dict[EngineServer, list[float]] = {engines.off: [], engines.on: []}
    beside: dict[EngineServer, list[float]] = {engines.off: [], engines.on: []}
    slowest: dict[EngineServer, list[float]] = {engines.off: [], engines.on: []}
    equal = 0
    for i in range(-1, rounds):  # one round warms up
        media, apart = tuple(islice(new, _IMAGES)), tuple(islice(new, _IMAGES))
        question, texts = words(20, next(seeds)), [words(100, next(seeds)) for _ in range(_TEXTS)]
        said = {}
        for server in engines.in_turn(i):
            said[server] = _look(server, question, media, f"{i}-{id(server)}")
            quiet = [server.chat(text, max_tokens=16, ignore_eos=True).total_s for text in texts]
            busy = _texts_meanwhile(server, question, apart, f"{i}b-{id(server)}", [f"so {t}" for t in texts])
            if i >= 0:
                first[server].append(said[server].ttft_s)
                alone[server].append(float(np.median(quiet)))
                beside[server].append(float(np.mean(busy)))
                slowest[server].append(max(busy))
        equal += i >= 0 and said[engines.off].token_ids == said[engines.on].token_ids
    for server in (engines.off, engines.on):
        found = hits(server, "embedding")
        if found["service_computed"] != found.total() or found.total() != 2 * _IMAGES * (rounds + 1):
            raise SystemExit(f"{dict(found)}: not every image was encoded by the service")
    early = int(engines.on.metric("cornplug_early_prefills_total"))
    if not early or engines.off.metric("cornplug_early_prefills_total"):
        raise SystemExit(
            f"{early} early prefills with it, or some without it: the sides were not what they should be"
        )
    rows: tuple[tuple[str, dict[EngineServer, list[float]], float | None], ...] = (
        (f"TTFT, {_IMAGES} images", first, TARGET),
        ("texts alone, total", alone, TEXT_TARGET),
        ("texts meanwhile, total, mean", beside, None),
        ("texts meanwhile, total, slowest", slowest, None),
    )
    report.rows += [
        Row(name=name, unit="s", stock=took[engines.off], cornplug=took[engines.on], target=target)
        for name, took, target in rows
    ]
    report.facts["equal answers of both sides"] = f"{equal} of {rounds}"
    report.facts["images in flight that were not waited for"] = early


def _look(server: EngineServer, question: str, media: tuple[bytes, ...], salt: str) -> Answer:
    return server.chat(question, images=media, max_tokens=8, ignore_eos=True, cache_salt=salt, timeout_s=600)


def _texts_meanwhile(
    server: EngineServer, question: str, media: tuple[bytes, ...], salt: str, texts: list[str]
) -> list[float]:
    """Seconds from sending each text to the end of its answer, while the images are looked at."""
    began = time.monotonic()

    def ask(i: int) -> float:
        time.sleep(max(0.0, began + i * _EVERY_S - time.monotonic()))
        return server.chat(texts[i], max_tokens=16, ignore_eos=True, timeout_s=600).total_s

    with ThreadPoolExecutor(1 + len(texts)) as pool:
        looked = pool.submit(_look, server, question, media, salt)
        asked = [pool.submit(ask, i) for i in range(len(texts))]
        looked.result()
        return [one.result() for one in asked]


if __name__ == "__main__":
    sys.exit(main())
