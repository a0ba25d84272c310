"""What a second host gets from the first one by a far store: prefixes (time to first token), and embeddings.

    python benchmarks/second_host.py [--quick] [--out DIR]

Two hosts have a store each, and a Redis server in common; what stands for a host here is a daemon with a
socket of its own. An engine of the first host answers prompts of about 1,500 tokens; when the far store has
their pages, this engine and its store are killed. Then a fresh engine with cornplug on the second host and a
fresh stock engine get the same prefixes with a new last question, in turns. Each page comes from Redis over
TCP, is opened and verified; the second host's memory has none of them before.

Then an encoder service of each host, one after the other, gets the same images: the first one encodes them,
the second one finds their embeddings in the far store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from driver import models
from driver.prefixes import ask_fresh_pair
from driver.requests import Request, images, words
from driver.stage import VLLM, Stage, hits, options, stage
from driver.table import Report, Row

from cornplug import EncoderClient
from devkit.checkpoints import CLIP_L_336
from devkit.engines import StoreProcess, wait_until
from devkit.far_servers import RedisServer, redis_program

TARGET, TARGET_OF_EMBEDDINGS = 0.4, 0.35
_LLM = {"hidden_size": 1024, "layers": 12, "heads": 16, "kv_heads": 8}
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4")
_PREFIX_TOKENS = 1500
_WRITTEN_S = 300


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers = 6 if chosen.quick else _LLM["layers"]
    report = Report(
        name="second_host",
        title="A second host, 1.5k-token prefix in a far store: time to first token",
        quick=chosen.quick,
        set_up=[
            f"Qwen2 of {layers} layers of 1024 (16 heads of 64, 8 KV heads), float32, random weights: a page "
            f"has {layers / 4:g} MiB.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens, then a last question that no engine has seen.",
            "Two stores with a Redis server in common, on one machine: TCP by the loopback device, without a "
            "network's latency.",
            "The first host's engine and store were killed once Redis had all pages.",
            "Embeddings: CLIP-L/336 (24 layers of 1024), float32; the time of a request to the encoder "
            "service, one at a time. In place of stock stands the first host, which encodes.",
            "Stock and cornplug: same checkpoint and flags, prefix caching on, both fresh, warmed up with "
            "the same unrelated prompts, asked in turns; the other one idles meanwhile.",
        ],
    )
    model = models.qwen2_text(**{**_LLM, "layers": layers})
    with stage(flags=_FLAGS, kv_gib=3) as here, _redis(here.folder) as redis:
        asked = [Request(words(_PREFIX_TOKENS, i)) for i in range(3 if chosen.quick else 8)]
        _serve_on_first_host(here, model, redis.url, asked)
        with _store(here, redis.url) as store, here.pair(model, "second") as pair:
            row = "TTFT, prefix in a far store"
            ask_fresh_pair(report, pair, asked, warm_tokens=_PREFIX_TOKENS, row=row, target=TARGET)
            (far,) = store.stat().far.values()
        report.facts["pages that the second host read from the far store"] = (
            f"{far.reads}, {far.read_bytes >> 20} MiB"
        )
        embeddings(report, here, redis.url, 4 if chosen.quick else 12)
    report.show()
    report.write(chosen.out)
    return 0


def _redis(folder: Path) -> RedisServer:
    program = redis_program()
    if program is None:
        raise SystemExit("this benchmark needs redis-server or valkey-server: script/setup installs one")
    return RedisServer(program, folder)


def _store(here: Stage, url: str) -> StoreProcess:
    """A host's store, empty; not started."""
    return StoreProcess(here.store_socket, "--far", url, size="4GiB", env=here.env)


def embeddings(report: Report, here: Stage, url: str, count: int) -> None:
    """Add the row of images that an encoder service of each host gets."""
    model = models.llava(hidden_size=256, layers=4, heads=4, vision=dict(CLIP_L_336), llm_seed=1)
    warm, *asked = islice(images(336), 1 + count)
    times: list[list[float]] = []
    passes: list[int] = []
    for _ in ("first host", "second host"):
        with _store(here, url) as store, here.encoder(model) as encoder, EncoderClient(encoder.url) as client:
            client.encode(warm, model=str(model))
            before, of_host = encoder.tower_passes(), list[float]()
            for image in asked:
                began_s = time.perf_counter()
                client.encode(image, model=str(model))
                of_host.append(time.perf_counter() - began_s)
            times.append(of_host)
            passes.append(encoder.tower_passes() - before)
            _wait_until_far(store)
    if passes != [count, 0]:
        raise SystemExit(f"tower passes of both hosts: {passes}: this measured something else")
    first, second = times
    report.rows.append(
        Row(
            name="embedding in a far store",
            unit="s",
            stock=first,
            cornplug=second,
            target=TARGET_OF_EMBEDDINGS,
        )
    )


def _wait_until_far(store: StoreProcess) -> None:
    """Until the far store has every entry of this one."""

    def written() -> bool:
        stat = store.stat()
        (far,) = stat.far.values()
        known = far.writes.get("written", 0) + far.writes.get("present", 0) + far.reads.get("read", 0)
        return known >= stat.entries and not far.queued

    wait_until(written, deadline_s=_WRITTEN_S, what="all entries in the far store")


def _serve_on_first_host(here: Stage, model: Path, url: str, asked: Sequence[Request]) -> None:
    store, first = _store(here, url), here.cornplug(model, "first", VLLM, "--cornplug-save", "always")
    store.start()
    try:
        first.start()
        for request in asked:
            request.then("who is this").ask(first)
        hits(first, "kv_page")  # two more steps: saved pages are committed
        store.settle(deadline_s=_WRITTEN_S)
        _wait_until_far(store)
    finally:
        first.kill()
        store.kill()


if __name__ == "__main__":
    sys.exit(main())
