"""Checks of the engines in this environment: their versions, and whether they load the plugin.

vLLM and SGLang pin different versions of the same libraries, so they are usually installed in different
environments. The doctor checks its own environment, which needs to contain only one engine. This module does
not import the engines. A short-lived process imports an engine in the same way as the engine's own processes.
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
from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.sglang_hooks import compat as sglang
from cornplug.sharing_verdict import NO_TOWER, decode_last_line, decode_verdicts
from cornplug.vllm_connector import compat as vllm

_ENTRY_NAME: Final = "cornplug"
_PROBE_TIMEOUT_S: Final = 120.0
_USAGE_ERROR: Final = 2
"""Exit status of argparse for an invalid command line."""
_MODEL_PROBE_TIMEOUT_S: Final = 900.0
"""Time limit in seconds for a process that imports an engine and reads the weights of a checkpoint."""

_VLLM_PROBE: Final = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from cornplug.vllm_connector import plugin
why_not = plugin.disabled_reason() or ("" if plugin.is_registered() else "it was not called")
print(json.dumps({"why_not": why_not}))
"""
_SGLANG_PROBE: Final = """
import importlib.util, json
from sglang.srt.plugins import load_plugins
load_plugins()
from cornplug.errors import ConfigError
from cornplug.sglang_hooks import flags, plugin
from cornplug.sglang_hooks.kv import hicache_config
result = {"why_not": "", "cache": ""}
try:
    flags.share()
    plugin.install(plugin.ALL)
except ConfigError as e:
    result["why_not"] = str(e)
try:
    hicache_config.compile_hash()
except ConfigError as e:
    result["cache"] = str(e)
import torch
patched = importlib.util.find_spec("sglang_hicache_cpu")
if not result["cache"] and not torch.cuda.is_available() and not patched:
    result["cache"] = "there is no GPU here"
print(json.dumps(result))
"""


_MODEL_PROBE: Final = """
import sys
from {plugins} import {load}
{load}()
from cornplug.sharing_verdict import encode_verdicts
from cornplug.{package}.sharing_report import describe
print(encode_verdicts(describe(sys.argv[1], sys.argv[2:])))
"""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the doctor's report. `remedy` is empty if no action is needed."""

    status: Literal["ok", "warn", "fail"]
    check: str
    what: str
    remedy: str = ""


class ProbeResult(msgspec.Struct, frozen=True):
    """Result of a process that imports an engine and its plugins."""

    why_not: str
    """Reason why the plugin is not active, or "" if it is active."""
    cache: str = ""
    """Reason why KV cannot be shared through the engine's cache, or "" if it can be shared."""


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """Facts about vLLM or SGLang that the checks need."""

    name: str
    group: str
    """Group of the entry points of the engine's plugins."""
    allow_variable: str
    """Environment variable that restricts which plugins the engine loads."""
    supported: VersionRange
    probe: str
    """Python program. The last line of its output is a `ProbeResult` as JSON."""
    model_probe: str
    """Python program whose arguments are a checkpoint and the engine's flags. The last line of its output is
    a list of `SharingVerdict` as JSON."""

    @property
    def label(self) -> str:
        """Official name of the engine."""
        return self.supported.engine


VLLM: Final = CheckedEngine(
    "vllm",
    "vllm.general_plugins",
    "VLLM_PLUGINS",
    vllm.SUPPORTED_VERSIONS,
    _VLLM_PROBE,
    _MODEL_PROBE.format(plugins="vllm.plugins", load="load_general_plugins", package="vllm_connector"),
)
SGLANG: Final = CheckedEngine(
    "sglang",
    "sglang.srt.plugins",
    "SGLANG_PLUGINS",
    sglang.SUPPORTED_VERSIONS,
    _SGLANG_PROBE,
    _MODEL_PROBE.format(plugins="sglang.srt.plugins", load="load_plugins", package="sglang_hooks"),
)
ENGINES: Final = (VLLM, SGLANG)


def installed_engines(name: str | None = None) -> list[CheckedEngine]:
    """Return the engines that are installed in this environment in a tested version.

    If `name` is set, only this engine is returned.
    """
    return [
        engine
        for engine in ENGINES
        if name in (None, engine.name) and not engine.supported.explain_mismatch()
    ]


def check_versions() -> Iterator[CheckResult]:
    """Report the versions of Python and cornplug, and check that installed engines are in their tested
    ranges."""
    yield CheckResult("ok", "versions", f"cornplug {__version__}, Python {platform.python_version()}")
    none_here = all(engine.supported.installed_version() is None for engine in (VLLM, SGLANG))
    for engine in (VLLM, SGLANG):
        remedy = f"pip install '{engine.name}{engine.supported}', or a cornplug release for your version."
        version = engine.supported.installed_version()
        if version is None and none_here:
            yield CheckResult("warn", engine.name, "not installed in this environment", remedy)
        elif version is None:
            yield CheckResult(
                "ok", engine.name, "not in this environment; run the doctor in the engine's environment"
            )
        elif version in engine.supported:
            yield CheckResult("ok", engine.name, f"{version}, in the tested range")
        else:
            yield CheckResult("fail", engine.name, f"{version}, tested versions: {engine.supported}", remedy)


def check_allocator(environ: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Check the settings of PyTorch's allocator, because vLLM rejects KV connectors with some of them."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if VLLM.supported.installed_version() is not None and "expandable_segments:True" in environ.get(name, ""):
        what = (
            f"{name}={environ[name]}: vLLM does not support KV connectors with it, so engines share only "
            "embeddings"
        )
        yield CheckResult("warn", "allocator", what, "Remove expandable_segments:True to share KV.")


def check_plugins() -> Iterator[CheckResult]:
    """Check for each installed engine that it loads the plugin and that the hooks are active."""
    for engine in (VLLM, SGLANG):
        if engine.supported.installed_version() is not None:
            yield from check_plugin(engine)


def check_plugin(engine: CheckedEngine) -> Iterator[CheckResult]:
    """Check that an engine loads the plugin and that the hooks are active."""
    check = f"{engine.name} plugin"
    if not entry_points(group=engine.group, name=_ENTRY_NAME):
        what = f"entry point {engine.group}:{_ENTRY_NAME} does not exist"
        yield CheckResult("fail", check, what, "Reinstall cornplug with pip.")
        return
    allowed = os.environ.get(engine.allow_variable)
    if allowed is not None and _ENTRY_NAME not in allowed.split(","):
        what = f"{engine.allow_variable}={allowed} excludes it"
        yield CheckResult("fail", check, what, f"Add {_ENTRY_NAME}, or unset {engine.allow_variable}.")
        return
    try:
        result = run_probe(engine)
    except subprocess.TimeoutExpired:
        what = f"a process that loads it took more than {_PROBE_TIMEOUT_S:g} s"
        yield CheckResult("fail", check, what, f"To find the cause, run: python -c 'import {engine.name}'")
        return
    if result.why_not:
        remedy = "Fix this problem. Engines log the same message."
        yield CheckResult("fail", check, f"did not register: {result.why_not}", remedy)
        return
    yield CheckResult("ok", check, f"found and registered by a process of {engine.label}")
    if result.cache:
        remedy = "Set CORNPLUG_ENGINE_SHARE_KV=false to share embeddings only."
        yield CheckResult("warn", f"{engine.name} cache", f"KV cannot be shared: {result.cache}", remedy)


def check_sharing(engine: CheckedEngine, model: str, flags: Sequence[str]) -> Iterator[CheckResult]:
    """Report what an engine would share for `model` with these flags, according to the plugin in the
    engine."""
    check = f"{engine.name} shares"
    try:
        done = _run(engine.model_probe, model, *flags, timeout_s=_MODEL_PROBE_TIMEOUT_S)
        verdicts = decode_verdicts(done.stdout)
    except subprocess.TimeoutExpired:
        what = f"{model}: a process that checks it took more than {_MODEL_PROBE_TIMEOUT_S:g} s"
        yield CheckResult("warn", check, what, "Try again. Fingerprints computed so far are cached.")
        return
    except msgspec.DecodeError:
        if done.returncode == _USAGE_ERROR and flags:
            what = f"{model}: {engine.label} rejects {' '.join(flags)}: {_stderr_tail(done).splitlines()[-1]}"
            yield CheckResult("fail", check, what, f"Write only flags of {engine.label} after --.")
            return
        what = f"{model}: the check failed: {_stderr_tail(done)}"
        yield CheckResult("warn", check, what, "Engines log what they share.")
        return
    for verdict in verdicts:
        said = {True: "shared", False: "not shared", None: "unknown"}[verdict.shared]
        what = f"{model}: {verdict.what} {said}" + (f": {verdict.why}" if verdict.why else "")
        fine = verdict.shared or verdict.why == NO_TOWER
        yield CheckResult("ok" if fine else "warn", check, what, verdict.remedy)


def run_probe(engine: CheckedEngine) -> ProbeResult:
    """Run a process that imports the engine and its plugins, and return its result.

    Raises subprocess.TimeoutExpired if the process takes longer than `_PROBE_TIMEOUT_S`.
    """
    done = _run(engine.probe, timeout_s=_PROBE_TIMEOUT_S)
    try:
        return decode_last_line(done.stdout, ProbeResult)
    except msgspec.DecodeError:
        return ProbeResult(_stderr_tail(done))


def _run(program: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _stderr_tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of a process's stderr, which contains the error message of a traceback."""
    return done.stderr.strip()[-300:] or f"it ended with status {done.returncode}"
