"""Request timing with `vllm bench serve`, which sends a list of requests with a given concurrency and times
each request.

`vllm bench serve` uses the completions API, so it also measures SGLang. Prompts are random tokens that no two
requests share, so that a prefix cache has no hits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cornplug.errors import ConfigError, CornplugError
from cornplug.host import without_proxies
from cornplug.planner.profiler.sample_grid import GridPoint, TimedPoint

_CHUNK_TOKENS: Final = 16
"""Number of tokens that one hash id stands for."""


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """Model that an engine serves, for `vllm bench serve`."""

    url: str
    name: str
    """Name of the model in the engine's API."""
    tokenizer: str
    """Folder or hub id of the tokenizer."""
    max_model_len: int
    """Maximum number of prompt and output tokens of a request."""


def command(served: BenchedModel, trace: Path, result: Path, *, requests: int, concurrency: int) -> list[str]:
    """Return the command that sends the requests of the file `trace` and writes their times to `result`."""
    return [
        vllm(),
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", served.url, "--model", served.name, "--tokenizer", served.tokenizer),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(_CHUNK_TOKENS)),
        *("--timed-trace-label-timestamp", "at_s", "--timed-trace-label-hash-ids", "hash_ids"),
        *("--timed-trace-label-input-length", "prompt_tokens"),
        *("--timed-trace-label-output-length", "output_tokens"),
        *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
        # Send no test request, because it would leave the first prompt in a prefix cache.
        *("--request-rate", "inf", "--ready-check-timeout-sec", "0", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
        *("--result-filename", result.name, "--disable-tqdm"),
    ]


def measure(
    served: BenchedModel,
    asks: Sequence[GridPoint],
    *,
    concurrency: int,
    first_id: int = 0,
    timeout_s: float = 3600,
) -> list[TimedPoint]:
    """Send the requests `asks` in order, and return their times.

    Calls with different values of `first_id` use different prompts. Raises CornplugError if a request fails,
    or with the end of the command's output if the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="cornplug-bench-") as folder:
        trace, result = Path(folder) / "trace.jsonl", Path(folder) / "result.json"
        trace.write_text(trace_lines(asks, first_id))
        line = command(served, trace, result, requests=len(asks), concurrency=concurrency)
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout_s,
            env=without_proxies(os.environ),
        )  # fmt: skip
        if done.returncode or not result.exists():
            raise CornplugError(
                f"`vllm bench serve` ended with status {done.returncode}:\n{_tail(done.stdout)}",
                reason="bench",
            )
        return timed(asks, json.loads(result.read_text()))


def trace_lines(asks: Sequence[GridPoint], first_id: int) -> str:
    """Return the JSON lines of a trace whose prompts share no hash id, and therefore no tokens."""
    lines, unused = [], first_id * 1_000_000
    for ask in asks:
        chunks = -(-ask.prompt_tokens // _CHUNK_TOKENS)
        lines.append(
            json.dumps(
                {
                    "at_s": 0,
                    "prompt_tokens": ask.prompt_tokens,
                    "output_tokens": ask.output_tokens,
                    "hash_ids": list(range(unused, unused + chunks)),
                }
            )
        )
        unused += chunks
    return "\n".join(lines) + "\n"


def timed(asks: Sequence[GridPoint], result: dict[str, Any]) -> list[TimedPoint]:
    """Return each of the requests `asks` with its time from the command's detailed result.

    Raises CornplugError if a request failed, or if its prompt or output did not have the requested length.
    """
    for i, error in enumerate(result["errors"]):
        if error:
            last = str(error).strip().splitlines()[-1]
            raise CornplugError(f"request {i} ({asks[i]}) failed: {last}", reason="bench")
    got = [
        GridPoint(prompt, output)
        for prompt, output in zip(result["input_lens"], result["output_lens"], strict=True)
    ]
    wrong = [i for i, (ask, ours) in enumerate(zip(asks, got, strict=True)) if ask != ours]
    if wrong:
        raise CornplugError(
            f"request {wrong[0]} should have been {asks[wrong[0]]}, but was {got[wrong[0]]}", reason="bench"
        )
    return [TimedPoint(ask, seconds) for ask, seconds in zip(asks, result["latencies"], strict=True)]


def vllm() -> str:
    """Return the path of the `vllm` command, next to this Python interpreter or on the PATH. Raises
    ConfigError if vLLM is not installed."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "vllm", "not installed, but `vllm bench serve` is needed to measure", "Install vLLM"
        )
    return found


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
