"""Time to first token of a data-parallel replica for a prefix that another replica has computed.

    python benchmarks/replicas.py [--quick] [--out DIR]

`vllm serve --data-parallel-size 2`, stock and with cornplug. Each prompt goes to replica 0 and then, with
another last question, to replica 1: stock computes it again, as its replicas share no KV.
"""

from __future__ import annotations

import sys
import time

import httpx
from driver import models
from driver.requests import words
from driver.stage import hits, options, stage
from driver.table import Report, Row

from devkit.engines import EngineServer

TARGET = 0.36
_MODEL = {"hidden_size": 1024, "heads": 16, "kv_heads": 8}
_FLAGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4"),
    *("--data-parallel-size", "2"),
)
_PREFIX_TOKENS = 1500


def main() -> int:
    """Measure, print and write; always 0, for a missed target is a figure and not a fault."""
    chosen = options(__doc__)
    layers, count = (4, 3) if chosen.quick else (8, 10)
    report = Report(
        name="replicas",
        title="A second data-parallel replica, same prefix: time to first token",
        quick=chosen.quick,
        set_up=[
            f"Qwen2 of {layers} layers of 1024 (16 heads of 64, 8 KV heads), float32, random weights.",
            f"Prefixes of about {_PREFIX_TOKENS} tokens, to replica 0, then with another end to replica 1.",
            "Stock and cornplug: same checkpoint and flags, warmed up, asked in turns.",
        ],
    )
    model = models.qwen2_text(layers=layers, **_MODEL)
    stock: list[float] = []
    shared: list[float] = []
    with (
        stage(flags=_FLAGS, kv_gib=1) as here,
        here.store("2GiB"),
        here.pair(model, "replicas") as pair,
    ):
        for server in (pair.stock, pair.cornplug):
            for replica in (0, 1):
                ttft_s(server, replica, words(300, 900 + replica))
        for i in range(count):
            prefix = words(_PREFIX_TOKENS, i)
            for server in pair.in_turn(i):
                ttft_s(server, 0, f"{prefix} who is this?")
            for server in pair.in_turn(i):
                side = stock if server is pair.stock else shared
                side.append(ttft_s(server, 1, f"{prefix} what happens next?"))
        found = hits(pair.cornplug, "kv_page").total()
    if found < count * (_PREFIX_TOKENS // 64 - 3):
        raise SystemExit(f"{found} pages of {count} prompts came from the store: no fair measurement")
    report.rows.append(Row(name="TTFT, replica 1", unit="s", stock=stock, cornplug=shared, target=TARGET))
    report.facts["pages from the store"] = found
    report.show()
    report.write(chosen.out)
    return 0


def ttft_s(server: EngineServer, replica: int, prompt: str) -> float:
    """Seconds until one replica has given an answer of one token."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers = {"X-data-parallel-rank": str(replica)}
    sent = time.perf_counter()
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False
    )
    answer.raise_for_status()
    return time.perf_counter() - sent


if __name__ == "__main__":
    sys.exit(main())
