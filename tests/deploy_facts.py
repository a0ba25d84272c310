"""Flags, routes and metrics of the code, for comparison with deploy/, read without an engine or torch."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from cornplug.encoder_service.service_metrics import ServiceGauges, ServiceMetrics
from cornplug.engine_common.shared_flags import SHARED_FLAGS
from cornplug.metrics import METRICS, STORE_METRICS
from cornplug.sglang_hooks.activation import ENABLE
from cornplug.vllm_connector.admission import _create_metrics

TREE: Final = Path(__file__).parents[1]
_PACKAGES: Final = "lib/python3*/site-packages"
_SOURCES: Final = {
    "store": ("cornplug/store/daemon/main.py",),
    "top": ("cornplug/commands/top.py",),
    "encoder": ("cornplug/encoder_service/server_flags.py",),
    "vllm": (
        f".venv/{_PACKAGES}/vllm/engine/arg_utils.py",
        f".venv/{_PACKAGES}/vllm/entrypoints/launchers/cli_args.py",
        "cornplug/vllm_connector/flags.py",
    ),
    "sglang": (f".venv-sglang/{_PACKAGES}/sglang/srt/arg_groups/fields/*.py",),
}
"""Process -> the files that have its flags: as texts, or as fields of the classes that engines read."""
_ROUTES: Final = {
    "encoder": ("cornplug/encoder_service/http/app.py",),
    "vllm": (f".venv/{_PACKAGES}/vllm/entrypoints/serve/instrumentator/health.py",),
    "sglang": (f".venv-sglang/{_PACKAGES}/sglang/srt/entrypoints/http_server.py",),
}


def _trees(patterns: Iterable[str]) -> Iterator[ast.Module]:
    for pattern in patterns:
        found = sorted(TREE.glob(pattern))
        assert found, f"{pattern} is nowhere: run script/setup"
        yield from (ast.parse(file.read_text()) for file in found)


@functools.cache
def flags(process: str) -> frozenset[str]:
    """All flags of a process: a key of `_SOURCES`."""
    found = (
        {*SHARED_FLAGS, ENABLE} if process == "sglang" else set(SHARED_FLAGS) if process == "vllm" else set()
    )
    for tree in _trees(_SOURCES[process]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[:2] == "--":
                found.add(node.value)
            elif isinstance(node, ast.ClassDef) and process in ("vllm", "sglang"):
                fields = [one.target.id for one in node.body if _is_field(one)]  # type: ignore[attr-defined]
                found |= {f"--{name.replace('_', '-')}" for name in fields}
    return frozenset(found)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def unknown_flags(process: str, words: Sequence[str]) -> list[str]:
    """The flags of a command line that the process does not have."""
    said = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [flag for flag in said if flag not in flags(process)]


@functools.cache
def routes(process: str) -> frozenset[str]:
    """Paths that the server of a process answers to GET."""
    found = set()
    for tree in _trees(_ROUTES[process]):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get"
            ):
                found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return frozenset(path for path in found if isinstance(path, str) and path.startswith("/"))


def constant(file: str, name: str) -> float:
    """The number that a module of cornplug's gives to a name."""
    for node in ast.parse((TREE / file).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
            return float(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no {name}")


@functools.cache
def series() -> dict[str, frozenset[str]]:
    """Name -> labels of every counter and gauge."""
    found = {name: frozenset(one.labels) for name, one in {**METRICS, **STORE_METRICS}.items()}
    registry = CollectorRegistry()
    _create_metrics(registry)
    for registered in (registry, ServiceMetrics(ServiceGauges(lambda: 0.0)).registry):
        for collector in registered._collector_to_names:
            for family in collector.collect():
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels: Any = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
                found[name] = frozenset(labels)
    return found


def pins() -> dict[str, str]:
    """Engine -> the release that script/setup installs."""
    text = (TREE / "script" / "setup").read_text()
    return {name.lower(): version for name, version in re.findall(r"\b(VLLM|SGLANG)=([\d.]+)", text)}
