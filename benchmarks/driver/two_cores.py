"""The plan's input of the closed loop: two apps, two language models and one tower on two cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.planner.inputs import profile_tables
from cornplug.planner.perf_model.engine_spec import PiecewiseCurve

GPU: Final = "cpu-core"
IMAGE_TOKENS: Final = 256
OUTPUT_TOKENS: Final = 12
_TEMPLATE_TOKENS: Final = 17
"""That the checkpoints' chat template puts around a question; one more around an image."""
HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class App:
    """One request type. It has its own language model; `images` also go through the tower."""

    name: str
    images: bool
    letters: tuple[int, ...]
    """Of a question, drawn evenly."""
    share: float
    """Of a core, for its engine."""
    utilisation: float
    """Of its engine, at the rate that is planned."""

    @property
    def text_tokens(self) -> list[int]:
        """As the plan counts them: the template's too, the image's not."""
        return [n + _TEMPLATE_TOKENS + self.images for n in self.letters]

    @property
    def prompt_tokens(self) -> list[int]:
        """As the engine counts them."""
        return [n + IMAGE_TOKENS * self.images for n in self.text_tokens]


APPS: Final = (
    App("look", images=True, letters=(24, 48, 96), share=1.0, utilisation=0.5),
    App("read", images=False, letters=(96, 192, 288), share=HALF, utilisation=0.45),
)
TOWER_UTILISATION: Final = 0.5


@dataclass(frozen=True)
class Profiles:
    """Tables of `cornplug profile`."""

    llm: dict[str, Path]
    """App -> table of its language model."""
    tower: Path

    def rate(self, app: App) -> float:
        """Requests a second that use this app's share of its engine, and of the tower, as wanted."""
        times = _curves(self.llm[app.name])
        output_s = (OUTPUT_TOKENS - 1) * times["decode"](1)
        service_s = sum(times["prefill"](n) for n in app.prompt_tokens) / len(app.prompt_tokens) + output_s
        rate = app.utilisation * app.share / service_s
        if app.images:
            rate = min(rate, TOWER_UTILISATION * HALF / _curves(self.tower)["encode"](IMAGE_TOKENS))
        return round(rate, 3)


def _curves(path: Path) -> dict[str, PiecewiseCurve]:
    points: dict[str, dict[float, float]] = {}
    for row in profile_tables.read(path).rows:
        points.setdefault(row.kind, {})[row.x] = row.seconds or 0.0
    wanted = {"prefill", "decode", "encode"} & points.keys()
    return {kind: PiecewiseCurve.from_points([*points[kind]], [*points[kind].values()]) for kind in wanted}


def plan_input(models: dict[str, Path], profiles: Profiles, rates: dict[str, float]) -> str:
    """The TOML of a plan for `rates` (app -> requests a second) on two cores of this host."""
    parts = [_HEAD]
    parts += [_component(app, models[app.name], profiles.llm[app.name]) for app in APPS]
    towers = [app for app in APPS if app.images]
    parts += [_tower(app, models[app.name], profiles.tower) for app in towers]
    parts += [_application(app, rates[app.name]) for app in APPS]
    return "\n".join(parts)


_HEAD = f"""\
# Written by benchmarks/plan_vs_real.py
name = "two-cores"

[[gpus]]
name = "{GPU}"
memory_gib = 6
bandwidth_gb_s = 10
bf16_tflops = 0.05
generation = "cpu"

[[pool]]
name = "cores"
gpu = "{GPU}"
gpus = 2
price_per_hour = 0.1
stock = 1
dram_gib = 1
host = "127.0.0.1"

[rules]
n_plus_one = false
# Processes on one core share no more than its time: quotas are exact, caches are per core.
interference = 0.0
max_utilisation = 0.95
online_share = 0.95
"""


def _component(app: App, model: Path, table: Path) -> str:
    return f"""
[[components]]
name = "{app.name}-llm"
kind = "llm"
model = "{model}"
checkpoint = "{model}"
tp = [1]
shares = [{app.share}]
engines = ["vllm"]
profiles = [{{ kind = "table", gpu = "{GPU}", engine = "vllm", file = "{table}" }}]"""


def _tower(app: App, model: Path, table: Path) -> str:
    return f"""
[[components]]
name = "{app.name}-tower"
kind = "encoder"
model = "{model}"
checkpoint = "{model}"
tower_of = "{app.name}-llm"
tp = [1]
shares = [{HALF}]
profiles = [{{ kind = "table", gpu = "{GPU}", file = "{table}" }}]"""


def _application(app: App, rate: float) -> str:
    evenly = [1] * len(app.letters)
    media = f'media = [{{ encoder = "{app.name}-tower", tokens = {IMAGE_TOKENS} }}]' if app.images else ""
    structure = "E+PD" if app.images else "monolith"
    return f"""
[[applications]]
name = "{app.name}"
llm = "{app.name}-llm"
structures = ["{structure}"]
# Loose: the plan is to be true, not tight.
slo = {{ percentile = "p95", ttft_s = 10.0 }}

[[applications.requests]]
name = "ask"
rate = {rate}
prompt = {{ values = {app.text_tokens}, weights = {evenly} }}
output = {OUTPUT_TOKENS}
{media}"""
