"""Are the engines of this environment ones that we know, and do their processes find us?

vLLM and SGLang pin other versions of the same libraries, so they mostly live in different
environments: the doctor looks at its own, and one engine in it is enough. Neither is imported
here; a short-lived process does that, as the engine's own processes do.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, Literal

import msgspec

from cornplug import __version__
from cornplug.engine_common.version_range import VersionRange
from cornplug.sglang_hooks import compat as sglang
from cornplug.sharing_verdict import NO_TOWER, last_of, verdicts_of
from cornplug.vllm_connector import compat as vllm

_ENTRY_NAME: Final = "cornplug"
_PROBE_S: Final = 120.0
_PARSER_REFUSED: Final = 2
"""Exit status of argparse after a wrong command line."""
_MODEL_PROBE_S: Final = 900.0
"""Of a process that reads a checkpoint's weights, besides importing an engine."""

_VLLM_PROBE: Final = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from cornplug.vllm_connector import plugin
print(json.dumps({"why_not": plugin.why_not() or ("" if plugin.registered() else "it was not called")}))
"""
_SGLANG_PROBE: Final = """
import importlib.util, json
from sglang.srt.plugins import load_plugins
load_plugins()
from cornplug.errors import ConfigError
from cornplug.sglang_hooks import flags, hook_registry, hook_selection
from cornplug.sglang_hooks.kv import hicache_config
answer = {"why_not": "", "cache": ""}
try:
    flags.share()
    hook_registry.install(hook_selection.ALL)
except ConfigError as e:
    answer["why_not"] = str(e)
try:
    hicache_config.compile_hash()
except ConfigError as e:
    answer["cache"] = str(e)
import torch
patched = importlib.util.find_spec("sglang_hicache_cpu")
if not answer["cache"] and not torch.cuda.is_available() and not patched:
    answer["cache"] = "there is no GPU here"
print(json.dumps(answer))
"""


_MODEL_PROBE: Final = """
import sys
from {plugins} import {load}
{load}()
from cornplug.sharing_verdict import last_line
from cornplug.{room}.sharing_report import describe
print(last_line(describe(sys.argv[1], sys.argv[2:])))
"""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the report. `remedy` is empty where nothing need be done."""

    status: Literal["ok", "warn", "fail"]
    check: str
    what: str
    remedy: str = ""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """The statement of one process of an engine. Empty where all is well."""

    why_not: str
    """Why the plugin is not in place."""
    cache: str = ""
    """Why the engine's cache cannot hand KV on."""


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """One of the two, as far as the checks know it."""

    name: str
    group: str
    """Of its entry points."""
    allow_variable: str
    """The environment variable that restricts which plugins it loads."""
    supported: VersionRange
    probe: str
    """A program; the last line of its output is a `ProbeAnswer` as JSON."""
    model_probe: str
    """A program whose arguments are a checkpoint and the engine's flags. The last line of its output is a
    list of `SharingVerdict` as JSON."""

    @property
    def label(self) -> str:
        """The name that its project gives it."""
        return self.supported.engine


VLLM: Final = CheckedEngine(
    "vllm",
    "vllm.general_plugins",
    "VLLM_PLUGINS",
    vllm.SUPPORTED_VERSIONS,
    _VLLM_PROBE,
    _MODEL_PROBE.format(plugins="vllm.plugins", load="load_general_plugins", room="vllm_connector"),
)
SGLANG: Final = CheckedEngine(
    "sglang",
    "sglang.srt.plugins",
    "SGLANG_PLUGINS",
    sglang.SUPPORTED_VERSIONS,
    _SGLANG_PROBE,
    _MODEL_PROBE.format(plugins="sglang.srt.plugins", load="load_plugins", room="sglang_hooks"),
)
ENGINES: Final = (VLLM, SGLANG)


def of_this_environment(name: str | None = None) -> list[CheckedEngine]:
    """The engines that are installed here in a tested version, or the one of this name if it is."""
    return [engine for engine in ENGINES if name in (None, engine.name) and not engine.supported.refusal()]


def versions() -> Iterator[CheckResult]:
    """Python, cornplug, and an engine inside its tested range."""
    yield CheckResult("ok", "versions", f"cornplug {__version__}, Python {platform.python_version()}")
    none_here = all(engine.supported.installed() is None for engine in (VLLM, SGLANG))
    for engine in (VLLM, SGLANG):
        remedy = f"pip install '{engine.name}{engine.supported}', or a cornplug release for what you have."
        version = engine.supported.installed()
        if version is None and none_here:
            yield CheckResult("warn", engine.name, "not installed in this environment", remedy)
        elif version is None:
            yield CheckResult("ok", engine.name, "not in this environment; ask the doctor of its own")
        elif version in engine.supported:
            yield CheckResult("ok", engine.name, f"{version}, in the tested range")
        else:
            yield CheckResult("fail", engine.name, f"{version}, tested are {engine.supported}", remedy)


def allocator(environ: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """vLLM takes a KV connector with PyTorch's default allocator only."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if VLLM.supported.installed() is not None and "expandable_segments:True" in environ.get(name, ""):
        what = (
            f"{name}={environ[name]}: vLLM takes no KV connector beside it, so engines share embeddings only"
        )
        yield CheckResult("warn", "allocator", what, "Leave expandable_segments:True out of it to share KV.")


def plugins() -> Iterator[CheckResult]:
    """Each engine that is here finds our entry point, and ends up with our hooks in place."""
    for engine in (VLLM, SGLANG):
        if engine.supported.installed() is not None:
            yield from plugin(engine)


def plugin(engine: CheckedEngine) -> Iterator[CheckResult]:
    """The same for one engine."""
    check = f"{engine.name} plugin"
    if not entry_points(group=engine.group, name=_ENTRY_NAME):
        what = f"no entry point {engine.group}:{_ENTRY_NAME}"
        yield CheckResult("fail", check, what, "pip install cornplug, again.")
        return
    allowed = os.environ.get(engine.allow_variable)
    if allowed is not None and _ENTRY_NAME not in allowed.split(","):
        what = f"{engine.allow_variable}={allowed} leaves it out"
        yield CheckResult("fail", check, what, f"Add {_ENTRY_NAME}, or unset {engine.allow_variable}.")
        return
    try:
        answer = ask(engine)
    except subprocess.TimeoutExpired:
        what = f"a process that loads it took over {_PROBE_S:g} s"
        yield CheckResult("fail", check, what, f"See why by: python -c 'import {engine.name}'")
        return
    if answer.why_not:
        remedy = "Correct what it names; engines log the same line."
        yield CheckResult("fail", check, f"did not register: {answer.why_not}", remedy)
        return
    yield CheckResult("ok", check, f"found and registered by a process of {engine.label}")
    if answer.cache:
        remedy = "Servers share embeddings only, with CORNPLUG_ENGINE_SHARE_KV=false."
        yield CheckResult("warn", f"{engine.name} cache", f"KV cannot be shared: {answer.cache}", remedy)


def shared_of(engine: CheckedEngine, model: str, flags: Sequence[str]) -> Iterator[CheckResult]:
    """The verdicts of an engine's own functions on `model` with these flags: shared, or the reason."""
    check = f"{engine.name} shares"
    try:
        done = _run(engine.model_probe, model, *flags, timeout_s=_MODEL_PROBE_S)
        verdicts = verdicts_of(done.stdout)
    except subprocess.TimeoutExpired:
        what = f"{model}: a process that looks at it took over {_MODEL_PROBE_S:g} s"
        yield CheckResult("warn", check, what, "Ask again: it keeps the fingerprints that it has read.")
        return
    except msgspec.DecodeError:
        if done.returncode == _PARSER_REFUSED and flags:
            what = f"{model}: {engine.label} refuses {' '.join(flags)}: {_end_of(done).splitlines()[-1]}"
            yield CheckResult("fail", check, what, f"Write {engine.label}'s own flags after --.")
            return
        what = f"{model}: no answer: {_end_of(done)}"
        yield CheckResult("warn", check, what, "Engines log what they share.")
        return
    for verdict in verdicts:
        said = {True: "shared", False: "not shared", None: "shared or not"}[verdict.shared]
        what = f"{model}: {verdict.what} {said}" + (f": {verdict.why}" if verdict.why else "")
        fine = verdict.shared or verdict.why == NO_TOWER
        yield CheckResult("ok" if fine else "warn", check, what, verdict.remedy)


def ask(engine: CheckedEngine) -> ProbeAnswer:
    """The statement of one process of the engine. Raises subprocess.TimeoutExpired."""
    done = _run(engine.probe, timeout_s=_PROBE_S)
    try:
        return last_of(done.stdout, ProbeAnswer)
    except msgspec.DecodeError:
        return ProbeAnswer(_end_of(done))


def _run(program: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    """The end of its standard error: a traceback's last lines say the cause."""
    return done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
