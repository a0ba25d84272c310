"""The planner's estimates beside published measurements of vLLM and SGLang on GPUs.

    python benchmarks/plan_vs_published.py --wheel aiconfigurator_core-0.12.0-*.whl [--out DIR]

The wheel (`pip download --no-deps aiconfigurator-core==0.12.0`, Apache-2.0) holds mean TTFT and TPOT of
closed loops (InferenceMAX and others) by model, GPU, engine, tensor parallelism, lengths and concurrency, and
the models' config.json. Each is predicted from the roofline by the planner's rule of iterations: 10 requests
for each client, all clients at once at the start, lengths 0.8 to 1 of the named ones. The constants of
`cornplug/planner/perf_model/roofline.py` were fitted to the points marked "fitted" of up to 16
clients; those marked "held out" had no part in it, nor had SGLang's.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import statistics
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cornplug.errors import CheckpointError
from cornplug.planner.inputs import gpu_catalog, llm_shape
from cornplug.planner.inputs.schema import Component, LLMShape, RooflineProfile
from cornplug.planner.perf_model import roofline
from cornplug.planner.perf_model.engine_spec import EngineSpec, EngineStepTimes
from cornplug.planner.plan import Parallelism

ROOT = "aiconfigurator_core"
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
WEIGHTS = {"fp8": "fp8", "": "none", "bf16": "none", "int4": "awq"}
NO_PLAIN_ATTENTION = ("Qwen3.5",)
"""Linear attention: no shape of the planner says it."""
NOT_FITTED = ("Qwen3-32B",)
"""How its measurements were driven is not said."""
CHUNK_TOKENS, MAX_BATCH = 8192, 512


@dataclass(frozen=True)
class Point:
    """One published measurement."""

    model: str
    shape: LLMShape
    engine: str
    gpu: str
    quantisation: str
    tp: int
    prompt: int
    output: int
    clients: int
    ttft_s: float
    tpot_s: float

    @property
    def part(self) -> str:
        if self.engine != "vllm":
            return "not fitted (SGLang)"
        if any(name in self.model for name in NOT_FITTED):
            return "not fitted (vLLM)"
        group = (self.model, self.gpu, self.tp, self.prompt, self.output)
        return "held out" if zlib.crc32(repr(group).encode()) % 2 else "fitted"


@dataclass
class Active:
    """A request that prefills or decodes."""

    came_s: float
    prompt: int
    output: int
    prefilled: int = 0
    made: int = 0
    """Tokens of its answer."""
    first_s: float = 0.0


def points(wheel: Path) -> Iterator[Point]:
    """The measurements of whole engines without data or expert parallelism beyond one node."""
    with zipfile.ZipFile(wheel) as archive:
        shapes: dict[str, LLMShape | None] = {}
        with archive.open(f"{ROOT}/systems/silicon_sample.csv") as raw:
            for row in csv.DictReader(io.TextIOWrapper(raw)):
                name = row["model_path"]
                if _comparable(row):
                    if name not in shapes:
                        shapes[name] = _shape(archive, name)
                    if (shape := shapes[name]) is not None:
                        yield _point(row, shape)


def _comparable(row: Mapping[str, str]) -> bool:
    return (
        row["mode"] == "agg"
        and row["backend"] in ("vllm", "sglang")
        and row["system"] in GPUS
        and row["precision"] in WEIGHTS
        and row["attention_dp_size"] in ("", "0", "1")
        and int(row["tp_size"]) <= 8
        and not any(name in row["model_path"] for name in NO_PLAIN_ATTENTION)
    )


def _shape(archive: zipfile.ZipFile, model: str) -> LLMShape | None:
    name = model.replace("/", "--")
    for known in (name, name.replace("Llama-3.1", "Meta-Llama-3.1")):
        path = f"{ROOT}/model_configs/{known}_config.json"
        if path in archive.namelist():
            try:
                return llm_shape.from_config(json.loads(archive.read(path)))
            except CheckpointError:
                return None
    return None


def _point(row: Mapping[str, str], shape: LLMShape) -> Point:
    return Point(
        model=row["model_path"],
        shape=shape,
        engine=row["backend"],
        gpu=GPUS[row["system"]],
        quantisation=WEIGHTS[row["precision"]],
        tp=int(row["tp_size"]),
        prompt=int(row["isl"]),
        output=int(row["osl"]),
        clients=int(row["batch_size"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def predicted(point: Point) -> tuple[float, float]:
    """Mean TTFT and TPOT of the point's closed loop, in seconds."""
    steps = roofline.llm_steps(
        Component(name="m", kind="llm"),
        point.shape,
        RooflineProfile(),
        EngineSpec(
            gpu=gpu_catalog.gpu_table()[point.gpu],
            engine=point.engine,
            parallelism=Parallelism(point.tp),
            share=1.0,
            quantisation=point.quantisation,
            chunk_tokens=CHUNK_TOKENS,
            max_batch=MAX_BATCH,
        ),
    )
    return closed_loop(steps, point.prompt, point.output, point.clients)


def closed_loop(steps: EngineStepTimes, prompt: int, output: int, clients: int) -> tuple[float, float]:
    """Mean TTFT and TPOT; a client's next request comes when its last one ends."""
    chance = random.Random(0)
    lengths = [
        (max(int(prompt * chance.uniform(0.8, 1)), 1), max(int(output * chance.uniform(0.8, 1)), 2))
        for _ in range(10 * clients)
    ]
    now, running = 0.0, list[Active]()
    waiting = [Active(0.0, *lengths.pop()) for _ in range(clients)]
    ttfts, tpots = list[float](), list[float]()
    while waiting or running:
        kv_tokens = sum(r.prompt + r.made for r in running)
        if waiting:
            count, tokens = 1, _prefill(waiting, CHUNK_TOKENS - len(running))
            now += steps.step_s(tokens, len(running), kv_tokens)
        else:  # nothing changes until the first of them ends
            count = min(r.output - r.made for r in running)
            now += count * steps.step_s(0, len(running), kv_tokens)
            now += steps.kv_token_s * len(running) * count * (count - 1) / 2
        for r in running:
            r.made += count
        for r in [r for r in running if r.made >= r.output]:
            running.remove(r)
            tpots.append((now - r.first_s) / (r.output - 1))
            if lengths:
                waiting.append(Active(now, *lengths.pop()))
        while waiting and waiting[0].prefilled == waiting[0].prompt:
            first = waiting.pop(0)
            first.first_s, first.made = now, 1
            ttfts.append(now - first.came_s + steps.request_overhead_s)
            running.append(first)
    return statistics.fmean(ttfts), statistics.fmean(tpots)


def _prefill(waiting: list[Active], budget: int) -> int:
    """Prompt tokens of the next iteration, which the requests then have."""
    left = budget
    for r in waiting:
        part = min(r.prompt - r.prefilled, left)
        r.prefilled += part
        left -= part
    return budget - left


@dataclass(frozen=True)
class Agreement:
    """Predicted over measured, of some points."""

    ttft: list[float]
    tpot: list[float]

    def line(self, name: str) -> str:
        within = [
            sum(low <= ratio <= 1 / low for ratio in ratios) / len(ratios)
            for ratios, low in ((self.ttft, 0.5), (self.tpot, 0.8), (self.tpot, 0.5))
        ]
        medians = f"{statistics.median(self.ttft):.2f} | {within[0]:.0%} | {statistics.median(self.tpot):.2f}"
        return f"| {name} | {len(self.ttft)} | {medians} | {within[1]:.0%} | {within[2]:.0%} |"


def table(found: list[tuple[Point, float, float]]) -> str:
    """A Markdown table: all points by part, then each model on each GPU."""
    groups: dict[str, Agreement] = defaultdict(lambda: Agreement([], []))
    for point, ttft, tpot in found:
        of = f"{point.model.partition('/')[2]}, {point.engine} on {point.gpu}, {point.part}"
        for name in (f"**{point.part}**", of):
            groups[name].ttft.append(ttft / point.ttft_s)
            groups[name].tpot.append(tpot / point.tpot_s)
    head = "| points | n | TTFT: median | in 2x | TPOT: median | in 20 % | in 2x |"
    return "\n".join(
        [head, "|---|--:|--:|--:|--:|--:|--:|", *(groups[name].line(name) for name in sorted(groups))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    found = [(point, *predicted(point)) for point in points(args.wheel)]
    text = (
        "# The planner's estimates beside published measurements\n\n"
        f"`python benchmarks/plan_vs_published.py`, {len(found)} closed loops of vLLM and SGLang from "
        f"{args.wheel.name.split('-cp')[0]} (Apache-2.0).\nPredicted over measured, mean TTFT and TPOT; "
        "no profile, only the roofline.\n\n"
        f"{table(found)}\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "plan_vs_published.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
