"""Measurement of an engine's iteration times through its HTTP API, with `vllm bench serve`.

`vllm bench serve` sends a list of requests with a given concurrency and times each request. It uses the
completions API, so it also measures SGLang. Prompts are random tokens that no two requests share, so that a
prefix cache has no hits.

The duration of these requests contains the following times:

1 prompt token, 1 output token           an iteration with one token, and all time off the device
n prompt tokens, 1 output token          an iteration with n prompt tokens, and all time off the device
many output tokens, b requests at once   iterations that generate one token for each of b requests
many output tokens after a long prompt   the same iterations with more context

Servers are started for a measurement, and then stopped with all their child processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.errors import ConfigError, CornplugError
from cornplug.host import free_port, tls_context, without_proxies
from cornplug.planner.inputs.profile_tables import ProfileRow
from cornplug.planner.inputs.schema import Engine
from cornplug.planner.launch.command_lines import TRACE_CHUNK_TOKENS, LaunchCommand
from cornplug.planner.launch.launcher import CommandProcess

_SHORT_TOKENS = 16
"""Prompt length of the requests that time decode iterations. It is short, so that context adds almost no
time."""
_COMMON_ENV: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without this, SGLang generates a token for each /health request.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
_CPU_ENV: Final[Mapping[Engine, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}
_CACHED_MAX: Final = 0.02
"""Maximum fraction of prompt tokens that the engine may take from its prefix cache. With a larger fraction,
the times of requests are not prefill times."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TimedPoint:
    point: GridPoint
    seconds: float
    """Seconds from sending the request until its last token.

    The times of single tokens are not used, because an engine whose API process is delayed sends several
    tokens together.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGrid:
    """Lengths and batch sizes of the requests to measure."""

    prompts: tuple[int, ...]
    """Prompt lengths in tokens, ascending."""
    batches: tuple[int, ...]
    """Numbers of requests that decode together, ascending. The first is 1."""
    output_tokens: int
    """Output tokens of the requests that time decode iterations."""
    repeats: int
    """Number of measurements of each request that is sent alone."""

    def __post_init__(self) -> None:
        for field, values in (("prompts", self.prompts), ("batches", self.batches)):
            if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
                raise ConfigError(
                    field, f"{values} is not ascending", "Write whole numbers above 0, as in 64,256,1024"
                )
        if self.batches[0] != 1:
            raise ConfigError("batches", "batch size 1 is missing", "Start with 1, as in 1,2,4,8")
        if self.output_tokens < 8:
            raise ConfigError(
                "output_tokens",
                f"{self.output_tokens} tokens are too few to measure",
                "Set 8 or more, such as 32",
            )

    def limit_to(self, max_model_len: int) -> SampleGrid:
        """Return the grid without the prompts that do not fit into `max_model_len` with their output tokens.
        Raises ConfigError if no prompt fits."""
        fitting = tuple(p for p in self.prompts if p + self.output_tokens <= max_model_len)
        if not fitting:
            raise ConfigError(
                "prompts",
                f"no length fits into {max_model_len} tokens with {self.output_tokens} output tokens",
                f"Add a length of at most {max_model_len - self.output_tokens}",
            )
        return replace(self, prompts=fitting)

    def isolated_requests(self) -> list[GridPoint]:
        """Return the requests to send one after another. The first request with each pair of lengths is
        warm-up.

        Requests with different lengths alternate, so that other work on the machine affects all of them.
        """
        kinds = [
            GridPoint(1, 1),
            *(GridPoint(p, 1) for p in (_SHORT_TOKENS, *self.prompts)),
            *(GridPoint(p, self.output_tokens) for p in (_SHORT_TOKENS, self.prompts[-1])),
        ]
        return list(dict.fromkeys(kinds)) * (self.repeats + 1)

    def batched_requests(self, batch: int) -> list[GridPoint]:
        """Return the requests to send `batch` at a time. Each wave of `batch` requests has the same lengths,
        so the requests of a wave end together. The first two waves are warm-up."""
        wave = [GridPoint(_SHORT_TOKENS, n) for n in (1, self.output_tokens) for _ in range(batch)]
        return wave * (self.repeats // 2 + 2)

    def rows(
        self,
        isolated: Sequence[TimedPoint],
        batched: Mapping[int, Sequence[TimedPoint]],
        **cell: str | int | None,
    ) -> list[ProfileRow]:
        """Return the rows of a profile table for these results, which include the warm-up requests. `cell`
        contains the other fields of `ProfileRow`.

        Decode times are for an empty context, and the time for each context token is a separate row. The time
        off the device is the duration of a request with one prompt token and one output token, minus a decode
        iteration with one request, which takes as long as the prefill of one token.
        """
        counted = isolated[len(isolated) // (self.repeats + 1) :]
        batches = {1: self._step_s(counted, _SHORT_TOKENS)}
        for batch, timed in batched.items():
            batches[batch] = self._step_s(timed[2 * batch :], _SHORT_TOKENS)
        context_s = self._context_s(counted, batches[1])
        mean_context = _SHORT_TOKENS + self.output_tokens / 2
        decode = {b: max(s - b * mean_context * context_s, s / 2) for b, s in sorted(batches.items())}
        overhead_s = max(_seconds(counted, GridPoint(1, 1)) - decode[1], 0.0)

        def row(kind: str, x: float, seconds: float) -> ProfileRow:
            return ProfileRow(kind=kind, x=x, seconds=seconds, **cell)  # type: ignore[arg-type]

        prefill = {p: max(_seconds(counted, GridPoint(p, 1)) - overhead_s, decode[1]) for p in self.prompts}
        return [
            *(row("prefill", p, s) for p, s in prefill.items()),
            *(row("decode", b, s) for b, s in decode.items()),
            *(row(kind, 1, s) for kind, s in (("kv_token", context_s), ("overhead", overhead_s)) if s > 0),
        ]

    def _step_s(self, timed: Sequence[TimedPoint], prompt_tokens: int) -> float:
        """Return the seconds of one decode iteration after prompts of this length.

        Raises CornplugError if more output tokens did not take more time, because noise then exceeds the
        times.
        """
        many, one = (_seconds(timed, GridPoint(prompt_tokens, n)) for n in (self.output_tokens, 1))
        if many <= one:
            raise CornplugError(
                f"{self.output_tokens} output tokens after {prompt_tokens} prompt tokens took {many:.4f} s, "
                f"and a single output token took {one:.4f} s. The machine is busy with other work, or the "
                "model is too small to measure",
                reason="noise",
            )
        return (many - one) / (self.output_tokens - 1)

    def _context_s(self, timed: Sequence[TimedPoint], short_s: float) -> float:
        """Return the seconds that one token of context adds to a decode iteration, or 0 if the noise exceeds
        it."""
        longest = self.prompts[-1]
        if longest <= _SHORT_TOKENS:
            return 0.0
        return max(self._step_s(timed, longest) - short_s, 0.0) / (longest - _SHORT_TOKENS)


def _seconds(timed: Iterable[TimedPoint], point: GridPoint) -> float:
    return median(t.seconds for t in timed if t.point == point)


def engine(
    kind: Engine, model: str, grid: SampleGrid, *, tp: int, pp: int, cores: Sequence[int]
) -> LaunchCommand:
    """Return the command of an engine that computes each prompt of the grid in one iteration, and all
    requests of a batch together.

    `cores` are the CPU cores on which the engine runs, one core per rank. If empty, the engine runs on GPUs.
    """
    # Allow one token more than the longest prompt, for engines that add a token to the prompt.
    most_tokens, most_requests = max(grid.prompts[-1] + 1, grid.batches[-1] * 32), grid.batches[-1]
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    if kind == "vllm":
        argv = [
            *("vllm", "serve", model, *where, "--no-enable-prefix-caching"),
            *("--max-num-batched-tokens", str(most_tokens), "--max-num-seqs", str(most_requests)),
            *("--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)),
        ]
    else:
        cpu = ("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.1")
        argv = [
            *("python", "-m", "sglang.launch_server", "--model-path", model, *where),
            *("--disable-radix-cache", "--chunked-prefill-size", str(most_tokens)),
            *("--max-running-requests", str(most_requests), "--tp-size", str(tp), "--pp-size", str(pp)),
            *((*cpu, "--max-total-tokens", "32768", "--sleep-on-idle") if cores else ()),
        ]
    return _command(
        "engine", argv, {**_COMMON_ENV, **(_core_binding_env(kind, cores) if cores else {})}, port, cores
    )


def encoder(model: str, *, folder: Path, cores: Sequence[int]) -> LaunchCommand:
    """Return the command of an encoder service for this model. The service has no store, and its socket is in
    `folder`. `cores` are the CPU cores on which the service runs. If empty, it runs on a GPU."""
    port = free_port()
    argv = ["cornplug", "encoder", "--model", model, "--no-store", "--port", str(port)]
    argv += ["--socket", str(folder / "encoder.sock")]
    argv += ["--device", "cpu", "--threads", str(len(cores))] if cores else []
    return _command("encoder", argv, {}, port, cores)


@contextmanager
def run_server(command: LaunchCommand, *, log: Path, ready_s: float) -> Iterator[str]:
    """Run a server for the block, and yield its URL.

    Raises ProcessFailed with the end of `log` if the server ends early, or is not ready after `ready_s`
    seconds.
    """
    with CommandProcess(command, log, ready_s=ready_s):
        yield f"http://127.0.0.1:{command.port}"


def _core_binding_env(kind: Engine, cores: Sequence[int]) -> dict[str, str]:
    bind_address = "|".join(map(str, cores))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind_address,
        "SGLANG_CPU_OMP_THREADS_BIND": bind_address,
        **_CPU_ENV[kind],
    }


def _command(
    kind: Literal["engine", "encoder"],
    argv: Sequence[str],
    env: Mapping[str, str],
    port: int,
    cores: Sequence[int],
) -> LaunchCommand:
    return LaunchCommand(
        group="profile",
        replica=0,
        host="127.0.0.1",
        argv=tuple(argv),
        env=env,
        kind=kind,
        port=port,
        health=f"http://127.0.0.1:{port}/health",
        cores=tuple(cores),
    )


def fetch_model(url: str, tokenizer: str | None) -> BenchedModel:
    """Return the model that the engine at this URL serves.

    `tokenizer` is the folder or hub id of the tokenizer, or None to use the tokenizer of the engine's model.
    Raises CornplugError if the engine does not reply or serves no model.
    """
    (model,) = _get_json(f"{url}/v1/models")["data"][:1] or [{}]
    if "id" not in model:
        raise CornplugError(f"{url} does not serve a model", reason="server")
    return BenchedModel(
        url, model["id"], tokenizer or model.get("root") or model["id"], model.get("max_model_len") or 32_768
    )


def measure_rows(
    target: BenchedModel, grid: SampleGrid, progress: Callable[[str, float], None], **cell: str | int | None
) -> list[ProfileRow]:
    """Measure every point of the grid, and return the rows of a profile table. `cell` contains the other
    fields of `ProfileRow`.

    Raises CornplugError if a request fails or if the engine used its prefix cache.
    """
    grid = grid.limit_to(target.max_model_len)
    parts = len(grid.batches)
    cached = _cached_tokens(target.url)
    progress("requests one by one", 0.0)
    isolated = _bench(target, grid.isolated_requests(), concurrency=1)
    batched = {}
    for i, batch in enumerate(grid.batches[1:], start=1):
        progress(f"{batch} requests at a time", i / parts)
        batched[batch] = _bench(target, grid.batched_requests(batch), concurrency=batch, first_id=i)
    progress("done", 1.0)
    prompt_tokens = sum(t.point.prompt_tokens for timed in (isolated, *batched.values()) for t in timed)
    found = _cached_tokens(target.url) - cached
    if found > _CACHED_MAX * prompt_tokens:
        raise CornplugError(
            f"the engine found {found:g} of {prompt_tokens} prompt tokens in its prefix cache. "
            "Start it with --no-enable-prefix-caching (SGLang: --disable-radix-cache)",
            reason="cached",
        )
    kv_tokens = capacity_tokens(target.url)
    capacity_rows = [ProfileRow(kind="kv_tokens", x=kv_tokens, **cell)] if kv_tokens else []  # type: ignore[arg-type]
    return [*grid.rows(isolated, batched, **cell), *capacity_rows]


def capacity_tokens(url: str) -> int:
    """Return the capacity of the engine's KV cache in tokens, or 0 if the engine does not report it."""
    for family in text_string_to_metric_families(_metrics(url)):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    try:
        return int(_get_json(f"{url}/get_server_info").get("max_total_num_tokens") or 0)
    except CornplugError:
        return 0


def version(url: str) -> str:
    """Return the engine's version, or "unknown" if the engine does not report it."""
    for path, field in (("/version", "version"), ("/get_server_info", "version")):
        try:
            return str(_get_json(url + path)[field])
        except (CornplugError, KeyError):
            continue
    return "unknown"


def _cached_tokens(url: str) -> float:
    """Return the number of prompt tokens that the engine has taken from its prefix cache since it started."""
    names = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
    return sum(
        sample.value
        for family in text_string_to_metric_families(_metrics(url))
        for sample in family.samples
        if sample.name in names
    )


def _metrics(url: str) -> str:
    """Return the text of the engine's /metrics, or "" if the engine has no metrics, which is SGLang's
    default."""
    try:
        response = httpx.get(f"{url}/metrics", timeout=10, trust_env=False, verify=tls_context())
    except httpx.TransportError as e:
        raise CornplugError(f"{url} does not respond: {e}", reason="server") from e
    return response.text if response.status_code == 200 else ""


def _get_json(url: str) -> dict[str, Any]:
    try:
        response = httpx.get(url, timeout=10, trust_env=False, verify=tls_context()).raise_for_status()
    except httpx.HTTPError as e:
        raise CornplugError(
            f"{url}: {e}. Check that this is the address of an engine.", reason="server"
        ) from e
    body: dict[str, Any] = response.json()
    return body


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


def bench_command(
    model: BenchedModel, trace: Path, result: Path, *, requests: int, concurrency: int
) -> list[str]:
    """Return the command that sends the requests of the file `trace` and writes their times to `result`."""
    return [
        _vllm_path(),
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", model.url, "--model", model.name, "--tokenizer", model.tokenizer),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(TRACE_CHUNK_TOKENS)),
        *("--timed-trace-label-timestamp", "at_s", "--timed-trace-label-hash-ids", "hash_ids"),
        *("--timed-trace-label-input-length", "prompt_tokens"),
        *("--timed-trace-label-output-length", "output_tokens"),
        *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
        # Send no test request, because it would leave the first prompt in a prefix cache.
        *("--request-rate", "inf", "--ready-check-timeout-sec", "0", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
        *("--result-filename", result.name, "--disable-tqdm"),
    ]


def _bench(
    model: BenchedModel,
    points: Sequence[GridPoint],
    *,
    concurrency: int,
    first_id: int = 0,
    timeout_s: float = 3600,
) -> list[TimedPoint]:
    """Send the requests `points` in order, and return their times.

    Calls with different values of `first_id` use different prompts. Raises CornplugError if a request fails,
    or with the end of the command's output if the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="cornplug-bench-") as folder:
        trace, result = Path(folder) / "trace.jsonl", Path(folder) / "result.json"
        trace.write_text(trace_lines(points, first_id))
        line = bench_command(model, trace, result, requests=len(points), concurrency=concurrency)
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout_s,
            env=without_proxies(os.environ),
        )  # fmt: skip
        if done.returncode or not result.exists():
            raise CornplugError(
                f"`vllm bench serve` ended with status {done.returncode}:\n{_tail(done.stdout)}",
                reason="bench",
            )
        return bench_times(points, json.loads(result.read_text()))


def trace_lines(points: Sequence[GridPoint], first_id: int) -> str:
    """Return the JSON lines of a trace whose prompts share no hash id, and therefore no tokens."""
    lines, unused = [], first_id * 1_000_000
    for point in points:
        chunks = -(-point.prompt_tokens // TRACE_CHUNK_TOKENS)
        lines.append(
            json.dumps(
                {
                    "at_s": 0,
                    "prompt_tokens": point.prompt_tokens,
                    "output_tokens": point.output_tokens,
                    "hash_ids": list(range(unused, unused + chunks)),
                }
            )
        )
        unused += chunks
    return "\n".join(lines) + "\n"


def bench_times(points: Sequence[GridPoint], result: dict[str, Any]) -> list[TimedPoint]:
    """Return the requests `points`, each with its time from the command's detailed result.

    Raises CornplugError if a request failed, or if its prompt or output did not have the requested length.
    """
    for i, error in enumerate(result["errors"]):
        if error:
            last = str(error).strip().splitlines()[-1]
            raise CornplugError(f"request {i} ({points[i]}) failed: {last}", reason="bench")
    got = [
        GridPoint(prompt, output)
        for prompt, output in zip(result["input_lens"], result["output_lens"], strict=True)
    ]
    wrong = [i for i, (point, ours) in enumerate(zip(points, got, strict=True)) if point != ours]
    if wrong:
        raise CornplugError(
            f"request {wrong[0]} should have been {points[wrong[0]]}, but was {got[wrong[0]]}", reason="bench"
        )
    return [TimedPoint(point, seconds) for point, seconds in zip(points, result["latencies"], strict=True)]


def _vllm_path() -> str:
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
