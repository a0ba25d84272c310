"""Load test of a plan: a trace for each request class, commands that replay the traces, and expected times.

`vllm bench serve` replays each trace with the trace's arrival times, on both vLLM and SGLang. Traces have the
lengths, bursts and prefix hits of the plan's input. Media are replaced by text tokens, so encoders have no
load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest, request_classes
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch import command_lines, command_list
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Plan
from cornplug.planner.report import formatting
from cornplug.planner.simulator import traffic

TRACE_SECONDS: Final = 120.0
"""Duration of a trace in seconds. It is adjusted so that a trace has at least `MIN_REQUESTS` and at most
`MAX_REQUESTS` requests."""
MIN_REQUESTS: Final = 200
MAX_REQUESTS: Final = 5000
"""Maximum number of requests in one trace."""
_CHUNK_TOKENS: Final = 16
"""Number of tokens that one hash id in a trace represents."""


@dataclass(frozen=True)
class LoadTest:
    """Load test that sends the requests of one class to one address."""

    demand: str
    file: str
    trace: str
    """JSON lines with the arrival time, lengths and hash ids of each request."""
    command: str
    expected: str
    """Rate, number of requests and expected times, in words."""


def load_tests(plan_input: PlanInput, plan: Plan, *, transfer: Transfer = "nixl") -> list[LoadTest]:
    """Return a load test for each request class and each of the class's addresses in routes.json. Classes
    without the address of a language model have no load test.

    Raises ConfigError if the plan has no placement.
    """
    routes = json.loads(command_lines.files(plan, transfer=transfer)["routes.json"])
    classes = request_classes(plan_input.applications)
    return [
        _load_test(plan_input, plan, classes[name], i, entry["url"], entry["weight"])
        for name, found in routes.items()
        for i, entry in enumerate(found["to"], 1)
    ]


def write(tests: Sequence[LoadTest], folder: Path) -> str:
    """Write the traces to the folder, and return a shell script that replays them, with the expected times as
    comments."""
    folder.mkdir(parents=True, exist_ok=True)
    for test in tests:
        (folder / test.file).write_text(test.trace, encoding="utf-8")
    lines = ["# Run all commands together. The plan's times are for all classes at once."]
    for test in tests:
        lines += [
            "",
            f"# {test.demand}: {test.expected}",
            f"{test.command} --dataset-path {command_list.quote(str(folder / test.file))} &",
        ]
    return "\n".join([*lines, "", "wait"])


def _load_test(
    plan_input: PlanInput, plan: Plan, request_class: RequestClass, number: int, url: str, weight: float
) -> LoadTest:
    forecast = next(f for f in plan.latency_forecasts if f"{f.app}/{f.request}" == request_class.name)
    rate = forecast.served * weight
    n = round(min(max(rate * TRACE_SECONDS, MIN_REQUESTS), MAX_REQUESTS))
    rng = np.random.default_rng([plan_input.rules.seed, number])
    hits = request_sampling.HitRates({}, forecast.prefix_hit_rate)
    requests = request_sampling.sample_requests(
        request_class.request, rng, n, patches_per_token={}, hits=hits
    )
    at_s = traffic.arrival_times(rate, request_class.request.burst, n, rng).tolist()
    return LoadTest(
        request_class.name,
        f"{request_class.app.name}-{request_class.request.name}-{number}.jsonl",
        "".join(json.dumps(line) + "\n" for line in _lines(requests, at_s)),
        " ".join(map(command_list.quote, _argv(_model(plan, request_class), url, n))),
        f"{formatting.rate(rate)}, {n} requests; {_expected(plan, request_class.name)}",
    )


def _lines(requests: Sequence[SampledRequest], at_s: Sequence[float]) -> Iterator[dict[str, object]]:
    """Yield the lines of a trace. Requests that hit the prefix cache begin with the same hash ids. Every
    other hash id occurs only once.
    """
    unused = 1_000_000
    for request, at in zip(requests, at_s, strict=True):
        shared = request.cached_tokens // _CHUNK_TOKENS
        new = -(-request.prompt_tokens // _CHUNK_TOKENS) - shared
        yield {
            "at_s": round(at, 4),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "hash_ids": [*range(shared), *range(unused, unused + new)],
        }
        unused += new


def _argv(model: str, url: str, requests: int) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", model, "--num-prompts", str(requests), "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,95,99"),
        *("--dataset-name", "timed_trace", "--self-timed"),
        *("--timed-trace-chunk-hash-size", str(_CHUNK_TOKENS)),
        *("--timed-trace-label-timestamp", "at_s", "--timed-trace-label-hash-ids", "hash_ids"),
        *("--timed-trace-label-input-length", "prompt_tokens"),
        *("--timed-trace-label-output-length", "output_tokens"),
    ]


def _model(plan: Plan, request_class: RequestClass) -> str:
    """Return the model's name in the engines to which the class's requests are sent."""
    return next(g.model for g in plan.groups if request_class.app.llm in g.components and "P" in g.tasks)


def _expected(plan: Plan, demand: str) -> str:
    found = []
    for check in formatting.slo_checks(plan):
        if check.demand == demand:
            bound = "" if check.bound is None else f" (bound {check.bound_text})"
            percentile = formatting.percentile(check.percentile)
            found.append(f"{percentile} {check.quantity} {check.simulated_text}{bound}")
    return "expect " + ", ".join(found) if found else "times unknown"
