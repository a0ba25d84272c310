"""Engines start, stock and with cornplug, and a fresh engine answers from another one's KV pages."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from driver.requests import Request, words
from driver.stage import SGLANG, VLLM, Stage, hits

from devkit.engines import Answer, EngineServer
from devkit.processes import at_once
from devkit.sglang_engine import sglang_python
from gpu_sections import sides
from gpu_sections.figures import Figures
from gpu_sections.sides import Size

_SIZE: Final = Size(tokens=2048, kv_gib=2)
_WORTH_KEEPING: Final = re.compile(
    r"V\d model runner|Using \S+ attention backend|FlashAttention version|Asynchronous scheduling|"
    r"\bcornplug(:| is )|Error: ",
    re.IGNORECASE,
)
_FIRST_TOKEN_LOGPROB: Final = 0.25
"""Above this difference of the first token's log-probability, an engine computes something else."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine and its flags, started three times: stock, with cornplug, and fresh with cornplug."""

    name: str
    engine: str
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
KINDS: Final = (
    Kind("vLLM", VLLM),
    Kind("vLLM V2, Triton attention", VLLM, ("--attention-backend", "TRITON_ATTN"), ((_RUNNER, "1"),)),
    Kind("vLLM V1", VLLM, (), ((_RUNNER, "0"),)),
    Kind("SGLang", SGLANG),  # last: it compiles kernels as it starts
)


def measure(figures: Figures) -> None:
    """Start each kind of engine; a kind that fails does not stop the next."""
    model = sides.small_model(figures)
    for number, kind in enumerate((KINDS[0], KINDS[-1]) if figures.rehearse else KINDS):
        if not _installed(kind.engine):
            figures.add(kind.name, "not installed")
            continue
        with (
            figures.step(kind.name),
            sides.engines(figures, _SIZE) as here,
            here.store("1GiB"),
        ):
            here.env.update(kind.variables)
            _share(figures, kind, here, model, number)


def _share(figures: Figures, kind: Kind, here: Stage, model: Path, number: int) -> None:
    requests = [Request(words(tokens, 1000 * number + tokens)) for tokens in (300, 900)]
    servers = {
        "stock": here.stock(model, kind.engine, *kind.flags),
        "cornplug": here.cornplug(model, "first", kind.engine, *kind.flags),
        "fresh": here.cornplug(model, "second", kind.engine, *kind.flags),
    }
    answers: dict[str, list[Answer]] = {}
    try:
        starts = at_once(*(_starting(server) for server in servers.values()))
        for side, seconds in zip(servers, starts, strict=True):
            figures.add(f"{kind.name}, {side}: start, s", round(seconds, 1))
        for side, server in servers.items():
            answers[side] = [request.ask(server) for request in requests]
            if side == "cornplug":
                hits(server, "kv_page")  # two more steps: saved pages are committed
        found = hits(servers["fresh"], "kv_page").total()
        prompts = sum(answer.prompt_tokens for answer in answers["stock"])
        figures.add(f"{kind.name}: KV pages from the store", found)
        figures.add(f"{kind.name}: prompt tokens", prompts)
        _compare(figures, kind, answers)
        if not found:
            raise SystemExit(f"{kind.name}: the fresh engine found no page in the store")
    finally:
        at_once(*(server.stop for server in servers.values()))
        for side, server in servers.items():
            figures.add(f"{kind.name}, {side}: log", _excerpt(server.log))


def _starting(server: EngineServer) -> Callable[[], float]:
    def start() -> float:
        began = time.monotonic()
        server.start()
        return time.monotonic() - began

    return start


def _compare(figures: Figures, kind: Kind, answers: dict[str, list[Answer]]) -> None:
    for side in ("cornplug", "fresh"):
        pairs = list(zip(answers["stock"], answers[side], strict=True))
        equal = sum(a.token_ids == b.token_ids for a, b in pairs)
        figures.add(f"{kind.name}, {side}: answers equal to stock's", f"{equal} of {len(pairs)}")
        first = max(sides.differences(a.logprobs[:1], b.logprobs[:1]) for a, b in pairs)
        figures.add(f"{kind.name}, {side}: first token's logprob, largest difference", round(first, 5))
        if first > _FIRST_TOKEN_LOGPROB:
            raise SystemExit(f"{kind.name}: {side} computes something else than stock")


def _installed(engine: str) -> bool:
    return sglang_python() is not None if engine == SGLANG else importlib.util.find_spec("vllm") is not None


def _excerpt(log: Path) -> Sequence[str]:
    """Lines that name the runner, the attention backend, cornplug's verdict, and errors."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return list(dict.fromkeys(line[:300] for line in lines if _WORTH_KEEPING.search(line)))[:12]
