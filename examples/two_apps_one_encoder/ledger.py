"""The measured cost of each request, read from counters before and after it.

Requests go one by one, so a counter's difference belongs to the request between. Counters of
an engine reach its /metrics with its next step: a tiny text request makes that step happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx
from host import Engine
from prometheus_client.parser import text_string_to_metric_families
from questions import FRESH_ENGINE, OTHER_FAMILY, Request

from devkit.engines import Answer, VllmServer

TOKENS: Final = 16
_TOP: Final = 5
LOGPROB_TOLERANCE: Final = 1e-4
_ORIGINS: Final = {
    "store": "store",
    "service_computed": "service, new",
    "service_coalesced": "service, in flight",
    "service_cached": "service, kept features",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One counted request to an engine that shares."""

    request: Request
    answer: Answer
    stock: Answer
    service_passes: int
    engine_passes: int
    embedding: str
    """Whence the engine had the embedding; "?" where no counter explains it."""
    kv_own: int
    """Prompt tokens whose KV this engine still had."""
    kv_store: int
    """Prompt tokens whose KV came out of the store."""

    @property
    def tower(self) -> str:
        """The process that ran the tower for this request."""
        ran = {"service": self.service_passes, "engine": self.engine_passes}
        return " and ".join(who for who, passes in ran.items() if passes) or "none"

    @property
    def same(self) -> bool:
        """Whether greedy tokens are stock's, and log-probabilities within the tolerance."""
        return same_output(self.answer, self.stock)


@dataclass(slots=True)
class Ledger:
    """The rows, and the warm-up's part of the encoder's count."""

    encoder_url: str
    rows: list[Row] = field(default_factory=list)
    warm_up_passes: int = 0
    _seen: set[tuple[int, str]] = field(default_factory=set)

    def ask(self, engine: Engine, request: Request, stock: Answer) -> Row:
        """Send a counted request and write its row."""
        before, passes = engine.metrics(), self.tower_passes()
        answer = ask(engine, request)
        flush(engine)
        made = _Difference(before, engine.metrics())
        row = Row(
            request=request,
            answer=answer,
            stock=stock,
            service_passes=self.tower_passes() - passes,
            engine_passes=made.of("cornplug_saves_total", what="embedding"),
            embedding=self._origin(engine, request, answer, made),
            kv_own=made.of("vllm:prefix_cache_hits_total"),
            kv_store=made.of("cornplug_saved_tokens_total"),
        )
        self._seen.add((engine.pid, request.image.name))
        self.rows.append(row)
        return row

    def warm_up(self, engine: Engine, request: Request) -> None:
        """Send an uncounted request; its tower passes are set aside."""
        before = self.tower_passes()
        ask(engine, request)
        flush(engine)
        self.warm_up_passes += self.tower_passes() - before

    def tower_passes(self) -> int:
        """Media that the encoder service has run a tower for, since it began."""
        text = httpx.get(f"{self.encoder_url}/metrics", timeout=10, trust_env=False).raise_for_status().text
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "cornplug_encoder_tower_passes_total"
        )

    def _origin(self, engine: Engine, request: Request, answer: Answer, made: _Difference) -> str:
        for source, words in _ORIGINS.items():
            if made.of("cornplug_hits_total", what="embedding", source=source):
                return words
        if made.of("cornplug_saves_total", what="embedding"):
            return "this engine, new"
        if (engine.pid, request.image.name) in self._seen:
            return "this engine's cache"
        # No token of the demo's tokenizers is longer than two bytes, so the image ends here at
        # the latest. With the KV of all of it at hand, an engine needs no embedding.
        image_end = answer.prompt_tokens - len(request.question) // 2
        reused = made.of("vllm:prefix_cache_hits_total") + made.of("cornplug_saved_tokens_total")
        return "not needed" if reused >= image_end else "?"

    # -- promises --------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Everything that makes the demo a failure; empty when it succeeded."""
        found = [
            f"{row.request.app.name}, {row.request.image.name}: another answer than stock's"
            for row in self.rows
            if not row.same
        ]
        found += [
            f"{row.request.app.name}, {row.request.image.name}: no counter says whence the embedding came"
            for row in self.rows
            if row.embedding == "?"
        ]
        if self.passes != self.distinct:
            found.append(f"{self.passes} tower passes for {self.distinct} distinct images")
        if self.tower_passes() != self.warm_up_passes + sum(row.service_passes for row in self.rows):
            found.append("the encoder ran its tower for something that no request asked for")
        if not all(row.kv_store for row in self.rows if row.request.act == FRESH_ENGINE):
            found.append("the fresh engine computed KV that the store should have had")
        return found

    @property
    def passes(self) -> int:
        """Tower passes of counted requests, by the service or by an engine."""
        return sum(row.service_passes + row.engine_passes for row in self.rows)

    @property
    def distinct(self) -> int:
        """Distinct images, counted once for each tower that has to see them."""
        return len({(row.request.act == OTHER_FAMILY, row.request.image.name) for row in self.rows})

    @property
    def saved_s(self) -> float:
        """Stock's time to first token minus this one's, summed over all rows, losses included."""
        return sum(row.stock.ttft_s - row.answer.ttft_s for row in self.rows)


class _Difference:
    """Counters after minus counters before, of one engine."""

    def __init__(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self._by = {sample: value - before.get(sample, 0.0) for sample, value in after.items()}

    def of(self, name: str, **labels: str) -> int:
        """Sum over the samples of `name` that carry these labels."""
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        return round(
            sum(
                by
                for sample, by in self._by.items()
                if sample.partition("{")[0] == name and all(label in sample for label in wanted)
            )
        )


def ask(engine: VllmServer, request: Request) -> Answer:
    """One request of the demo, to a stock engine or to one that shares."""
    return engine.chat(request.messages(), max_tokens=TOKENS, top_logprobs=_TOP, ignore_eos=True)


def flush(engine: VllmServer) -> None:
    """A few more steps of the engine: saves are acknowledged, counters published."""
    engine.chat("Thank you.", max_tokens=4, ignore_eos=True)


def same_output(one: Answer, other: Answer) -> bool:
    """Whether tokens are identical, and the log-probabilities of each step's best ones close."""
    if one.token_ids != other.token_ids or len(one.token_ids) != TOKENS:
        return False
    mine, theirs = one.top_logprobs, other.top_logprobs
    if [len(row) for row in mine] != [_TOP] * TOKENS or [len(row) for row in theirs] != [_TOP] * TOKENS:
        return False
    return all(
        abs(a - b) <= LOGPROB_TOLERANCE
        for here, there in zip(mine, theirs, strict=True)
        for a, b in zip(here, there, strict=True)
    )
