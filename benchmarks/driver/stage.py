"""The processes of one benchmark: a store, an encoder service, and engines with equal flags.

A stock and a cornplug engine live side by side and take turns, so that other changes
on the machine meet both; while one answers the other waits, and its idle CPU time is
measured. Both get the same environment and flags but for cornplug's own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from devkit.engines import EncoderProcess, EngineServer, StoreProcess, VllmServer
from devkit.processes import cpu_s, together
from devkit.sglang_engine import SglangServer

VLLM: Final = "vLLM"
SGLANG: Final = "SGLang"

# Left to itself vLLM pins its threads to cores by whether a KV connector is configured, and
# two engines to the same one: equal conditions need it switched off, on both sides.
_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_READY_S = 600
_SOURCES = ("store", "service_computed", "service_coalesced", "service_cached")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    quick: bool
    out: Path
    engine: str = VLLM
    default: bool = False
    """Only stock and the default, in more rounds."""


def options(description: str | None, *, engines: bool = False, default: bool = False) -> Options:
    """`[--quick] [--out DIR]`; with `engines` also `[--sglang]`, with `default` also `[--default]`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer samples; three minutes")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results", metavar="DIR",
        help="folder for NAME.md, NAME.json and NAME.png",
    )  # fmt: skip
    if engines:
        parser.add_argument("--sglang", action="store_true", help="SGLang in place of vLLM")
    if default:
        parser.add_argument("--default", action="store_true", help="stock and the default alone, more rounds")
    args = parser.parse_args()
    # More threads than cores would measure the kernel's scheduler.
    os.environ.setdefault("OMP_NUM_THREADS", str(compute_threads()))
    engine = SGLANG if engines and args.sglang else VLLM
    return Options(args.quick, args.out, engine, default and args.default)


def compute_threads() -> int:
    """Compute threads of each engine and of the encoder service: OMP_NUM_THREADS, or half of the cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two live engines of one model."""

    stock: EngineServer
    cornplug: EngineServer

    def in_turn(self, i: int) -> tuple[EngineServer, EngineServer]:
        """Both, in an order that changes with each round."""
        return (self.stock, self.cornplug) if i % 2 == 0 else (self.cornplug, self.stock)


class Stage:
    """Starts processes in a temporary folder, which goes with them.

    `flags` are vLLM's, `sglang_flags` SGLang's; the stock and the cornplug side get the same.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        kv_gib: int,
        sglang_flags: Sequence[str] = (),
        *,
        start_together: bool = False,
    ) -> None:
        self.folder = folder
        self._start_together = start_together
        self.flags = tuple(flags)
        self.sglang_flags = tuple(sglang_flags)
        self.store_socket = folder / "store.sock"
        self.encoder_socket = folder / "encoder.sock"
        self._threads = str(compute_threads())
        # `devkit.processes.environment` passes only what this process was started with.
        self.env = {
            **_ENVIRONMENT,
            "OMP_NUM_THREADS": self._threads,
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "CORNPLUG_STORE_SECRET_FILE": str(folder / "secret"),
            "CORNPLUG_STORE_SOCKET": str(self.store_socket),
        }
        self._started = 0

    def store(self, size: str) -> StoreProcess:
        return StoreProcess(self.store_socket, size=size, env=self.env)

    def encoder(self, *models: Path, dtype: str = "float32") -> EncoderProcess:
        threads = ("--threads", self._threads)
        options: dict[str, Any] = {"env": self.env, "ready_s": _READY_S}
        return EncoderProcess(models, *threads, socket=self.encoder_socket, dtype=dtype, **options)

    def stock(self, model: Path, engine: str = VLLM, *extra: str) -> EngineServer:
        return self._engine(model, engine, *extra)

    def options(self, name: str) -> dict[str, Any]:
        """Log, environment and time to start of a vLLM that a baseline starts itself."""
        return {"log": self.folder / f"{name}.log", "env": self.env, "ready_s": _READY_S}

    def cornplug(self, model: Path, app: str, engine: str = VLLM, *extra: str) -> EngineServer:
        return self._engine(
            model, engine, *(("--kv-connector", "cornplug") if engine == VLLM else ()),
            "--cornplug-app", app,
            "--cornplug-store", str(self.store_socket), "--cornplug-encoder", str(self.encoder_socket),
            # A tower pass of CLIP-L takes seconds on a CPU; the default is for GPUs.
            "--cornplug-encoder-deadline", "120",
            *extra,
        )  # fmt: skip

    def _engine(self, model: Path, engine: str, *extra: str) -> EngineServer:
        self._started += 1
        log = self.folder / f"engine-{self._started}.log"
        kind, flags = (VllmServer, self.flags) if engine == VLLM else (SglangServer, self.sglang_flags)
        return kind(model, *flags, *extra, log=log, env=self.env, ready_s=_READY_S)

    @contextmanager
    def pair(
        self, model: Path, app: str, engine: str = VLLM, *, cornplug_first: bool = False
    ) -> Iterator[Pair]:
        """A fresh stock engine and a fresh cornplug engine, ended on exit."""
        made = Pair(self.stock(model, engine), self.cornplug(model, app, engine))
        with ExitStack() as stack:
            if self._start_together:
                stack.enter_context(together(made.stock, made.cornplug))
            else:
                for server in (made.cornplug, made.stock) if cornplug_first else (made.stock, made.cornplug):
                    stack.enter_context(server)
            yield made


@contextmanager
def stage(
    *, flags: Sequence[str], kv_gib: int, sglang_flags: Sequence[str] = (), start_together: bool = False
) -> Iterator[Stage]:
    """A stage whose engines have these flags, and vLLM `kv_gib` GiB for KV.

    Args:
        start_together: Whether the two engines of a pair start side by side.
    """
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as folder:
        yield Stage(Path(folder), flags, kv_gib, sglang_flags, start_together=start_together)


class Idle:
    """CPU time of each engine of a pair while it was idle."""

    def __init__(self, pair: Pair) -> None:
        self._names = {pair.stock: "stock", pair.cornplug: "cornplug"}
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._time_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def watch(self, engine: EngineServer) -> Iterator[None]:
        """Count the CPU time of `engine` inside the block."""
        name = self._names[engine]
        used, began = cpu_s(engine), time.monotonic()
        yield
        self._used_s[name] += cpu_s(engine) - used
        self._time_s[name] += time.monotonic() - began

    def __str__(self) -> str:
        shares = {name: 100 * self._used_s[name] / s for name, s in self._time_s.items()}
        return ", ".join(f"{name} {share:.1f} % of a core" for name, share in sorted(shares.items()))


def hits(server: EngineServer, what: str) -> Counter[str]:
    """Items of `what` that this engine has had from elsewhere so far, by source."""
    # A step's counters come out with the next one.
    for _ in range(2):
        server.chat("so", max_tokens=2)
    return Counter(
        {source: int(server.metric("cornplug_hits_total", kind=what, source=source)) for source in _SOURCES}
    )
