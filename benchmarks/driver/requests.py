"""Requests: words of a chosen length and images that were never seen before."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from devkit.engines import Answer, EngineServer, photos

_WORDS = (
    *("the", "diagram", "shows", "a", "house", "beside", "water", "and", "people", "who", "walk"),
    *("along", "under", "trees", "while", "light", "falls", "from", "one", "side", "on", "stone"),
    *("roofs", "windows", "with", "boats", "that", "wait", "for", "evening"),
)
_CHARACTERS_PER_TOKEN = 1.45
"""Of these words in the tokenizer of our checkpoints, which knows bytes and pairs of letters."""


def words(tokens: int, seed: int) -> str:
    """About `tokens` tokens of text that differs from the first word on for each seed."""
    rng = random.Random(seed)
    text = f"{seed} "
    while len(text) < tokens * _CHARACTERS_PER_TOKEN:
        text += rng.choice(_WORDS) + " "
    return text


def images(edge: int) -> Iterator[bytes]:
    """Distinct square images cut from photographs, all near `edge` pixels wide.

    Raises RuntimeError when there are no more.
    """
    for size in (edge, *(edge + sign * 4 * i for i in range(1, 13) for sign in (-1, 1))):
        for photo in photos():
            yield from photo.crops(size, size)
    raise RuntimeError(f"no more distinct images of {edge} pixels")


@dataclass(frozen=True, slots=True)
class Request:
    """One question."""

    prompt: str
    images: tuple[bytes, ...] = ()
    max_tokens: int = 8

    def then(self, question: str) -> Request:
        """The same prefix and another end."""
        return Request(f"{self.prompt} {question}?", self.images)

    def ask(self, server: EngineServer) -> Answer:
        """Its answer. Generation does not stop early, so both sides do the same work."""
        return server.chat(
            self.prompt, images=self.images, max_tokens=self.max_tokens, ignore_eos=True, timeout_s=600
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Outcome of a list of requests on one side."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer."""
        return sum(a.prompt_tokens + len(a.token_ids) for a in self.answers) / self.wall_s


def run(server: EngineServer, requests: Sequence[Request], concurrency: int) -> Load:
    """All `requests` in their order, `concurrency` at a time."""
    waiting = iter(requests)
    lock = threading.Lock()
    answers: list[tuple[int, Answer]] = []
    number = {id(request): i for i, request in enumerate(requests)}

    def work() -> None:
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            answers.append((number[id(request)], request.ask(server)))

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        for done in [pool.submit(work) for _ in range(concurrency)]:
            done.result()
    wall_s = time.perf_counter() - began
    return Load(tuple(answer for _, answer in sorted(answers, key=lambda pair: pair[0])), wall_s)
