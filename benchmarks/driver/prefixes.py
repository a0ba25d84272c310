"""Prefixes that another engine has had, asked of a fresh pair of engines in turns."""

from __future__ import annotations

from collections.abc import Sequence

from driver.requests import Request, words
from driver.stage import Idle, Pair, hits
from driver.table import Report, Row

_REASONS = ("absent", "cheaper", "disk_late")


def ask_fresh_pair(
    report: Report, pair: Pair, asked: Sequence[Request], *, warm_tokens: int, row: str, target: float
) -> None:
    """Add the row of their times to first token, for a new last question, and what makes it fair.

    Raises SystemExit where less than 90 % of the prompts' tokens came from the store.

    Args:
        warm_tokens: Length of the unrelated prompts that both engines answer before.
    """
    stock, shared, tokens, equal = list[float](), list[float](), list[int](), 0
    idle = Idle(pair)
    for i in range(2):
        for server in (pair.stock, pair.cornplug):
            Request(words(warm_tokens, 900 + i)).ask(server)
    for i, request in enumerate(asked):
        question = request.then("what happens next")
        answers = {}
        for server, other in zip(pair.in_turn(i), reversed(pair.in_turn(i)), strict=True):
            with idle.watch(other):
                answers[server] = question.ask(server)
        stock.append(answers[pair.stock].ttft_s)
        shared.append(answers[pair.cornplug].ttft_s)
        tokens.append(answers[pair.stock].prompt_tokens)
        equal += answers[pair.stock].token_ids == answers[pair.cornplug].token_ids
    hits(pair.cornplug, "kv_page")  # two more steps: all is counted
    saved = int(pair.cornplug.metric("cornplug_saved_tokens_total"))
    if saved < 0.9 * sum(tokens):
        misses = {
            reason: int(pair.cornplug.metric("cornplug_misses_total", kind="kv_page", reason=reason))
            for reason in _REASONS
        }
        raise SystemExit(
            f"{saved} of {sum(tokens)} prompt tokens came from the store, missed pages {misses}: "
            "no fair measurement"
        )
    report.rows.append(Row(name=row, unit="s", stock=stock, cornplug=shared, target=target))
    report.facts["prompt tokens"] = f"{min(tokens)} to {max(tokens)}"
    report.facts["prompt tokens from the store"] = f"{saved} of {sum(tokens)}"
    report.facts["answers equal on both sides, token by token"] = f"{equal} of {len(asked)}"
    report.facts["used by the engine that waits"] = str(idle)
