"""The engines' own clients: `vllm bench serve` and `sglang.bench_serving`.

Both take prompts from a file, so that engines on both sides of a measurement get texts that nobody else has
(their random data sets count through the vocabulary, and that of a small checkpoint soon repeats).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from devkit.engines import EngineServer, vllm_command
from devkit.processes import environment
from devkit.sglang_engine import sglang_python
from driver.stage import SGLANG, VLLM

SITE: Final = Path(__file__).parents[2] / ".bench-site"
"""What SGLang's client imports and its environment lacks."""
_TIMEOUT_S: Final = 1800


@dataclass(frozen=True, slots=True)
class Served:
    """What a client measured."""

    requests_per_s: float
    tokens_per_s: float
    """Prompt and answer."""
    ttft_s: tuple[float, ...]
    """In the order of the requests."""
    tpot_s: float
    """Mean of the requests' times per output token after the first."""


def serve(
    server: EngineServer,
    engine: str,
    checkpoint: Path,
    folder: Path,
    prompts: Sequence[str],
    output_tokens: int,
    *,
    rate: float = float("inf"),
    concurrency: int | None = None,
) -> Served:
    """Figures of `engine`'s own client for these prompts, one request each.

    Args:
        checkpoint: The model's, for its tokenizer.
        folder: For the client's files.
        rate: Arrivals a second, Poisson; inf: all at once.
        concurrency: Requests at a time; None: no bound.

    Raises SystemExit where the client fails, or a request.
    """
    load = ["--num-prompts", str(len(prompts)), "--request-rate", str(rate)]
    if concurrency is not None:
        load += ["--max-concurrency", str(concurrency)]
    data = folder / "prompts.json"
    if engine == SGLANG and not SITE.is_dir():
        raise SystemExit(f"{SITE.name} is not there. Run: script/site bench")
    # The second turn only has to be there: the answer's length is another option.
    turns = [{"conversations": [{"value": text}, {"value": "An answer."}]} for text in prompts]
    data.write_text(json.dumps(turns), encoding="utf-8")
    load += ["--dataset-name", "sharegpt", "--dataset-path", str(data)]
    load += ["--sharegpt-output-len", str(output_tokens)]
    if engine == VLLM:
        return vllm_bench_serve(server, checkpoint, folder, load)
    result = folder / "sglang_bench.jsonl"
    command = [
        str(sglang_python()), "-m", "sglang.bench_serving", "--backend", "sglang-oai",
        "--base-url", server.url, "--model", str(checkpoint), "--served-model-name", "model",
        *load, "--seed", "0", "--disable-tqdm", "--warmup-requests", "0", "--output-file", str(result),
        "--output-details",
    ]  # fmt: skip
    return _served(_run(command, result, PYTHONPATH=str(SITE)), "total_throughput")


def vllm_bench_serve(server: EngineServer, checkpoint: Path, folder: Path, options: Sequence[str]) -> Served:
    """Figures of `vllm bench serve` with these options of its load and data set."""
    result = folder / "vllm_bench.json"
    command = [
        vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", "model",
        "--tokenizer", str(checkpoint), "--seed", "0", "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        # Its first try of the server would be a second request of the first prompt.
        "--ready-check-timeout-sec", "0", *options,
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", result.name,
    ]  # fmt: skip
    return _served(_run(command, result), "total_token_throughput")


def _run(command: Sequence[str], result: Path, **env: str) -> dict[str, Any]:
    result.unlink(missing_ok=True)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment({"HF_HUB_OFFLINE": "1", **env}),
    )
    if done.returncode or not result.exists():
        raise SystemExit(f"{' '.join(command[:4])}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if failed := [error for error in found["errors"] if error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0][-2000:]}")
    return found


def _served(found: dict[str, Any], throughput: str) -> Served:
    return Served(
        requests_per_s=found["request_throughput"], tokens_per_s=found[throughput],
        ttft_s=tuple(found["ttfts"]), tpot_s=found["mean_tpot_ms"] / 1e3,
    )  # fmt: skip
