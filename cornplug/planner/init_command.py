"""`cornplug plan init`: write a first plan input for a model and a list of GPUs.

The file has every table, marked placeholders, and optional keys as comments. It lists machines that have the
GPUs, with their prices, and the GPUs on which the model fits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError
from cornplug.planner.candidates.replica_configs import TP_WITHOUT_NVLINK
from cornplug.planner.inputs import gpu_catalog, toml_reader
from cornplug.planner.inputs.component_shapes import StartingModel, starting_model, weights_bytes
from cornplug.planner.inputs.components import TP_DEGREES
from cornplug.planner.inputs.field_types import suggest_known_name
from cornplug.planner.inputs.gpu_catalog import GpuPrice
from cornplug.planner.inputs.schema import (
    GpuSpec,
    InputTable,
    LLMShape,
    Quantisation,
    RooflineProfile,
    TowerShape,
)
from cornplug.planner.perf_model.roofline import compute_efficiency
from cornplug.settings import GIB

_MODEL_LEN: Final = 8192
_PROMPT_TOKENS: Final = 1000
_TTFT_S: Final = (1.0, 2.0, 5.0, 10.0)
_TPOT_S: Final = (0.05, 0.1, 0.2, 0.5)
_SLO_SLACK: Final = 3.0
"""Minimum ratio of a placeholder SLO to the estimated time of the computation alone. The difference is for
queueing and batching."""
_HEAD: Final = """\
# Input of `cornplug plan`, written by `{command}`.
#
#   cornplug plan {file}
#
# Values marked "placeholder" are guesses. Replace them with your own. docs/plan-input.md of cornplug explains
# every key, including the keys that are not used here. For completion and checks in an editor with
# Even Better TOML or Taplo, run
#   cornplug plan schema > plan.schema.json
# and add `#:schema ./plan.schema.json` as the first line of this file.
# Times are in seconds, rates in requests per second, prices in dollars per hour, and memory in GiB.
name = {name}

# Components: models, and the parts of models that can run separately --------------------------------
"""
_LLM: Final = """
[[components]]
name = {name}
kind = "llm"
{source}
max_model_len = {max_model_len} # placeholder: maximum tokens of a prompt and its output
{of_quantisations}
quantisations = {quantisations}
tp = {tp} # tensor-parallel degrees to choose from, within one machine
engines = ["vllm", "sglang"] # engines to choose from
# Until the model's times are measured, they are estimated from the GPU's data sheet and marked as ESTIMATE.
# `cornplug profile llm --model MODEL --gpu {gpu} --out llm.csv` measures them on the GPU:
# profiles = [{{ kind = "table", gpu = {gpu_text}, file = "llm.csv" }}, {{ kind = "roofline" }}]
profiles = [{{ kind = "roofline" }}]
"""
_TOWER: Final = """
# The model's tower. The plan can keep it in the engine ("monolith"), or run it separately as an encoder
# service ("E+PD") that all engines with the same tower share.
[[components]]
name = {name}
kind = "encoder"
tower_of = {llm}
{source}shares = [0.25, 0.5, 1.0] # fractions of a GPU that a replica can use
# `cornplug profile encoder --model MODEL --gpu {gpu} --out encoder.csv` measures the tower's times:
# profiles = [{{ kind = "table", gpu = {gpu_text}, file = "encoder.csv" }}, {{ kind = "roofline" }}]
profiles = [{{ kind = "roofline" }}]
"""
_APPLICATION: Final = """
# Applications: the load and the latency targets -----------------------------------------------------

[[applications]]
name = "app"
llm = {llm}
workload = "online" # "semi-online" can wait for seconds; "offline" can wait for hours and needs no slo
structures = {structures} # "P+D" and "E+P+D" (prefill and decode on separate engines) take longer to plan

[applications.slo]
percentile = "p95" # statistic of the requests that the bounds apply to: "mean", "p50", "p95" or "p99"
ttft_s = {ttft} # placeholder: seconds to the first token
tpot_s = {tpot} # placeholder: seconds per output token after the first
# e2e_s = 20.0

[[applications.requests]]
name = "chat"
rate = 5.0 # placeholder: mean requests per second
peak = 1.5 # placeholder: the plan is made for rate x peak
burst = 1.0 # 1: Poisson arrivals; 4: times between arrivals vary twice as much
prompt = {{ mean = {prompt}, cv = 1.0, max = {most_prompt} }} # placeholder: text tokens; cv: std / mean
output = {{ mean = {mean_output}, cv = 0.8, max = {most_output} }} # placeholder: output tokens
# Instead of prompt and output, a recorded trace as CSV with at_s, prompt_tokens and output_tokens:
# trace = "requests.csv"
# Prefix that all prompts share, and the share of requests that find it in a cache:
# prefix = {{ tokens = 200, hit_rate = 0.9 }}
"""
_MEDIA: Final = """
[[applications.requests.media]]
encoder = {encoder}
items = 1 # placeholder: items per request
tokens = {tokens} # {of_tokens}
# Share of items whose embedding is in the cache, or the number of different items:
# hit_rate = 0.3
# catalogue = 100000
"""
_POOL: Final = """
# Pool: available machines. Delete those that you cannot get -----------------------------------------
"""
_MACHINE: Final = """
[[pool]]
name = {name}
gpu = {gpu}
gpus = {gpus}
{prices}
stock = 8 # placeholder: maximum number of machines
"""
_RULES: Final = """
# Rules ----------------------------------------------------------------------------------------------

[rules]
objective = "cost" # cheapest plan that meets every SLO; "goodput", "max-min": most load on this stock
n_plus_one = true # every online service survives the loss of one replica; "node": of any one machine
online_share = 0.8 # share of an engine's capacity for online work; the rest is headroom for peaks
"""
_WEIGHTS_SHARE: Final = 0.8
"""Fraction of a GPU's memory that weights may use. The rest is for the KV cache and the engine."""
_ROOFLINE: Final = RooflineProfile()


def main(argv: list[str]) -> int:
    """Run `cornplug plan init`, and return the exit status. Raises ConfigError for a wrong argument."""
    args = _parser().parse_args(argv)
    out: Path = args.output
    if out.exists() and not args.force:
        raise ConfigError(f"-o {out}", "already exists", "Choose another file, or add --force.")
    gpus = [gpu.strip() for gpu in args.gpus.split(",") if gpu.strip()]
    if not gpus:
        raise ConfigError("--gpus", "contains no GPU", "Write, for example, --gpus H100,L40S.")
    model = starting_model(args.model)
    folder = _relative_to(out.parent, Path(args.model)) if Path(args.model).is_dir() else None
    command = shlex.join(["cornplug", "plan", "init", args.model, "--gpus", ",".join(gpus)])
    text = _first_input(model, gpus, folder=folder, file=out.name, command=command)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"-o {out}", f"cannot be written: {e.strerror}", "Choose a file in a folder that you can write."
        ) from e
    toml_reader.read(out)
    print(f"Written: {out}. Fill in the values marked placeholder, then run: cornplug plan {out}")
    return 0


def _relative_to(start: Path, folder: Path) -> str:
    """Return the path of `folder` relative to the folder `start`. An absolute path stays absolute."""
    return str(folder) if folder.is_absolute() else os.path.relpath(folder, start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug plan init",
        description="Write a first input file for `cornplug plan`, with comments: the model, its "
        "vision or audio tower, a placeholder workload with latency targets, and machines with prices.",
        epilog="docs/plan-input.md lists hub ids and keys. Exit status: 0 written, 2 wrong argument.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder, or a hub id that cornplug knows or that is in the local cache",
    )
    parser.add_argument(
        "--gpus", required=True, metavar="GPU[,GPU]", help="GPU types of the price table, such as H100,L40S"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("plan.toml"),
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    return parser


def _first_input(
    model: StartingModel, gpus: Sequence[str], *, folder: str | None, file: str, command: str
) -> str:
    """Return the text of a TOML file that `cornplug plan` accepts unchanged.

    `folder` is the checkpoint's path relative to the file, or None for a hub id. Raises ConfigError for an
    unknown GPU, or if the model does not fit on any of the GPUs.
    """
    machines = _priced_machines(gpus)
    options = _hosting_options(model.llm, model.quantisation, machines)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name.rstrip("/").rpartition("/")[2]).strip("-._") or "llm"
    tower = f"{name}-tower"
    parts = [
        _HEAD.format(command=command, file=file, name=json.dumps(name)),
        _llm(name, model, folder, options),
        _tower(tower, name, model.tower, folder, options) if model.tower else "",
        _application(name, model, options),
        _media(tower, model) if model.tower else "",
        _POOL,
        *(_machine(machine) for machine in machines),
        _RULES,
    ]
    return "".join(parts)


def _llm(name: str, model: StartingModel, folder: str | None, options: Sequence[_HostingOption]) -> str:
    wanted = [q for q in (model.quantisation, "fp8") if q in {option.quantisation for option in options}]
    said = "# Quantisation of the published weights."
    if model.quantisation == "none":
        said = (
            '# To choose from: "none" is 16 bits, as published. "fp8" halves the weights: check the output '
            "quality first."
        )
    return _LLM.format(
        name=json.dumps(name),
        source=_source(model, folder, model.llm),
        max_model_len=min(_MODEL_LEN, model.llm.max_context),
        quantisations=json.dumps(list(dict.fromkeys(wanted))),
        of_quantisations=said,
        tp=[degree for degree in TP_DEGREES if model.llm.heads % degree == 0],
        **_gpu(options),
    )


def _tower(
    name: str, llm: str, shape: TowerShape, folder: str | None, options: Sequence[_HostingOption]
) -> str:
    source = "" if folder else f"shape = {_inline(shape)}\n"
    return _TOWER.format(name=json.dumps(name), llm=json.dumps(llm), source=source, **_gpu(options))


def _source(model: StartingModel, folder: str | None, shape: InputTable) -> str:
    """Return the lines of a component that set the model or checkpoint, and the shape if there is no
    config.json from which it can be read."""
    if folder is not None:
        return f"checkpoint = {json.dumps(folder)} # its config.json gives the size"
    lines = f"model = {json.dumps(model.name)} # name on the engines' command lines"
    return lines if model.from_checkpoint else f"{lines}\nshape = {_inline(shape)}"


def _inline(shape: InputTable) -> str:
    """Format a shape as an inline TOML table, without the keys that have their default value."""
    fields: dict[str, float] = shape.model_dump(exclude_defaults=True, exclude={"kind"})
    return "{ " + ", ".join(f"{key} = {_number(value)}" for key, value in fields.items()) + " }"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.5g}".replace("e+", "e").replace("e0", "e")


def _gpu(options: Sequence[_HostingOption]) -> dict[str, str]:
    return {"gpu": options[0].gpu.name, "gpu_text": json.dumps(options[0].gpu.name)}


def _application(name: str, model: StartingModel, options: Sequence[_HostingOption]) -> str:
    prompt = min(_PROMPT_TOKENS, model.llm.max_context // 8)
    tokens = prompt + (model.media_tokens if model.tower else 0)
    ttft = min(option.prefill_s(model.llm, tokens) for option in options)
    tpot = min(option.step_s(model.llm) for option in options)
    return _APPLICATION.format(
        llm=json.dumps(name),
        structures=json.dumps(["monolith", "E+PD"] if model.tower else ["monolith"]),
        ttft=next((s for s in _TTFT_S if s >= _SLO_SLACK * ttft), _TTFT_S[-1]),
        tpot=next((s for s in _TPOT_S if s >= _SLO_SLACK * tpot), _TPOT_S[-1]),
        prompt=prompt,
        most_prompt=4 * prompt,
        mean_output=min(250, prompt // 2),
        most_output=min(1000, 2 * prompt),
    )


def _media(tower: str, model: StartingModel) -> str:
    said = "prompt tokens per item"
    if not model.fixed_tokens:
        said = "placeholder: prompt tokens per item, which depend on its size"
    return _MEDIA.format(encoder=json.dumps(tower), tokens=model.media_tokens, of_tokens=said)


def _price(row: GpuPrice) -> str:
    return f"${row.price_per_hour:.2f} per hour: {row.source}, {row.date}"


def _machine(machine: _PricedMachine) -> str:
    first, *others = machine.prices
    lines = [
        f"shape = {json.dumps(first.shape)} # {_price(first)}",
        *(f"# shape = {json.dumps(other.shape)} # {_price(other)}" for other in others),
        f"# price_per_hour = {first.price_per_hour:.2f} # your price of one machine in dollars per hour",
    ]
    return _MACHINE.format(
        name=json.dumps(f"{machine.gpu.lower()}-x{machine.gpus}"),
        gpu=json.dumps(machine.gpu),
        gpus=machine.gpus,
        prices="\n".join(lines),
    )


@dataclass(frozen=True)
class _PricedMachine:
    """Machine with a number of GPUs of one type, and the prices of such machines."""

    prices: tuple[GpuPrice, ...]
    """Rows of the price table. `cornplug plan` uses the first row if its input has only the GPU type and the
    number of GPUs."""

    @property
    def gpu(self) -> str:
        return self.prices[0].gpu

    @property
    def gpus(self) -> int:
        return self.prices[0].gpus


@dataclass(frozen=True)
class _HostingOption:
    """GPU type on which the model fits, with the weights as published, or in FP8 if only FP8 weights fit."""

    gpu: GpuSpec
    quantisation: Quantisation
    max_tp: int
    """Largest tensor-parallel degree of the model in one machine with this GPU type."""

    def step_s(self, llm: LLMShape) -> float:
        """Return the estimated seconds of a decode step at `max_tp`: the time to read the active weights
        once."""
        active = (llm.active_parameters or llm.parameters) / llm.parameters
        read = weights_bytes(llm, self.quantisation, tp=self.max_tp) * active
        return read / (_ROOFLINE.bandwidth_efficiency * self.gpu.bandwidth_gb_s * 1e9)

    def prefill_s(self, llm: LLMShape, tokens: int) -> float:
        """Return the estimated seconds to compute a prompt at `max_tp`, with two operations for each weight
        and token."""
        flops = 2 * (llm.active_parameters or llm.parameters) * tokens
        efficiency = compute_efficiency(self.gpu, fp8=False, experts=llm.active_parameters is not None)
        return flops / (efficiency * self.gpu.bf16_tflops * 1e12 * self.max_tp)


def _priced_machines(gpus: Sequence[str]) -> list[_PricedMachine]:
    """Return the machines in the price table that have these GPUs, in the order of `gpus`. Machines with the
    same GPU are in the order of their number of GPUs.

    Raises ConfigError for a GPU that is not in the table.
    """
    table = gpu_catalog.price_table()
    known = list(dict.fromkeys(row.gpu for row in table))
    found = []
    for gpu in dict.fromkeys(gpus):
        rows = sorted((row for row in table if row.gpu == gpu), key=lambda row: row.gpus)
        if not rows:
            remedy = f"{suggest_known_name(gpu, known)} Add other GPUs to the file as [[gpus]] and [[pool]]."
            raise ConfigError("--gpus", f"no GPU {gpu!r} in the price table", remedy)
        found += [_PricedMachine(tuple(of)) for _, of in groupby(rows, key=lambda row: row.gpus)]
    return found


def _hosting_options(
    llm: LLMShape, published: Quantisation, machines: Sequence[_PricedMachine]
) -> list[_HostingOption]:
    """Return the GPU types of these machines on which the model fits. Raises ConfigError if there are none.

    `published` is the quantisation of the published weights.
    """
    if found := _find_fitting_options(llm, published, machines):
        return found
    every = _priced_machines([row.gpu for row in gpu_catalog.price_table()])
    able = ", ".join(option.gpu.name for option in _find_fitting_options(llm, published, every))
    remedy = (
        f"GPUs with enough memory: {able}."
        if able
        else "Write a file with pp by hand, see docs/plan-input.md."
    )
    names = ", ".join(dict.fromkeys(machine.gpu for machine in machines))
    gib = weights_bytes(llm, published) / GIB
    raise ConfigError("--gpus", f"weights of {gib:.0f} GiB do not fit on one machine with {names}", remedy)


def _find_fitting_options(
    llm: LLMShape, published: Quantisation, machines: Sequence[_PricedMachine]
) -> list[_HostingOption]:
    table = gpu_catalog.gpu_table()
    # Machines are sorted by size, so the last machine with a GPU type is the largest.
    most = {machine.gpu: machine.gpus for machine in machines}
    found = (_option(llm, published, table[gpu], gpus) for gpu, gpus in most.items())
    return [option for option in found if option is not None]


def _option(llm: LLMShape, published: Quantisation, gpu: GpuSpec, gpus: int) -> _HostingOption | None:
    most = gpus if gpu.nvlink else min(gpus, TP_WITHOUT_NVLINK)
    tp = max(degree for degree in TP_DEGREES if degree <= most and llm.heads % degree == 0)
    choices: tuple[Quantisation, ...] = (published, "fp8") if published == "none" else (published,)
    for quantisation in choices:
        computes = quantisation != "fp8" or gpu.fp8_tflops > 0
        if computes and weights_bytes(llm, quantisation, tp=tp) <= _WEIGHTS_SHARE * gpu.memory_gib * GIB:
            return _HostingOption(gpu, quantisation, tp)
    return None
