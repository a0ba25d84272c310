"""Requests that come when they come: Poisson arrivals, streamed answers, each timed by its client.

It shares the machine with the engines, so it does little: prompts and images are made
beforehand, and of an answer only the times of its first and last token are kept.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and when it is sent, seconds from the start."""

    at_s: float
    kind: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Took:
    """How one request went. Seconds from its arrival; NaN where it failed."""

    kind: str
    at_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int


def arrivals(rate: float, n: int, seed: int) -> np.ndarray:
    """Times of `n` Poisson arrivals, (n,), stretched so that their rate is `rate`."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))
    return times * (n / rate / times[-1])


def letters(tokens: int, seed: int) -> str:
    """Text of exactly so many tokens: our checkpoints' tokenizer merges lower-case letters only."""
    return "".join(random.Random(seed).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=tokens))


def body(text: str, output_tokens: int, image: bytes | None = None) -> dict[str, Any]:
    """A chat completion that says exactly so many tokens."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def run(requests: Sequence[Arrival]) -> list[Took]:
    """Outcomes of the arrivals, in their order; each is sent at its time, also while others wait."""
    return asyncio.run(_run(sorted(requests, key=lambda r: r.at_s)))


async def _run(requests: Sequence[Arrival]) -> list[Took]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        began = time.perf_counter()
        return list(await asyncio.gather(*(_one(client, request, began) for request in requests)))


async def _one(client: httpx.AsyncClient, request: Arrival, began: float) -> Took:
    content = json.dumps(request.body).encode()
    await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
    first, last, prompt_tokens = math.nan, math.nan, 0
    due = began + request.at_s
    url = f"{request.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    async with client.stream("POST", url, content=content, headers=headers) as response:
        if response.status_code == 200:
            async for line in response.aiter_lines():
                if '"usage":{' in line:
                    prompt_tokens = json.loads(line.removeprefix("data: "))["usage"]["prompt_tokens"]
                # The first event names the role only; words have a content.
                elif '"content":"' in line and '"content":""' not in line:
                    last = time.perf_counter() - due
                    first = last if math.isnan(first) else first
    return Took(request.kind, request.at_s, first, last, prompt_tokens)
