"""Which engines are here, and whether they find us: whatever this environment holds."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cornplug.checkpoints.tested_releases import VersionRange
from cornplug.commands import engine_checks
from cornplug.commands.engine_checks import SGLANG, VLLM, CheckedEngine, CheckResult
from cornplug.sharing_verdict import NO_TOWER, SharingVerdict, encode_verdicts

HERE = [engine for engine in (VLLM, SGLANG) if importlib.util.find_spec(engine.name) is not None]


def said(text: str, status: int = 0) -> str:
    """A probe that says this and ends so."""
    return f"import sys; print({text!r}); sys.stderr.write('no such hook here'); sys.exit({status})"


def by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in findings}


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("0.32.0", None), ("ok", "ok")),
        (("0.32.4+cpu", "0.5.23"), ("ok", "ok")),
        (("0.31.9", None), ("fail", "ok")),
        (("0.34.0", "0.5.23"), ("fail", "ok")),
        ((None, "0.5.23.post1"), ("ok", "ok")),
        ((None, "0.5.22"), ("ok", "fail")),
        ((None, "0.5.24"), ("ok", "fail")),
        ((None, None), ("warn", "warn")),
    ],
)
def test_engine_checks_one_engine_in_its_range_is_enough(
    versions: tuple[str | None, str | None], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine is enough; one outside its range is none."""
    installed = dict(zip(("vllm", "sglang"), versions, strict=True))
    monkeypatch.setattr(VersionRange, "installed_version", lambda self: installed[self.package])
    found = by_name(list(engine_checks.check_versions()))
    assert (found["vllm"].status, found["sglang"].status) == expected
    for finding in (found["vllm"], found["sglang"]):
        assert bool(finding.remedy) == (finding.status != "ok")


def names_in(module: str) -> set[str]:
    """Names that a module defines, read from its source: its engine may not be installed here."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin)
    found = {each.stem for each in source.parent.glob("*.py")} if source.name == "__init__.py" else set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_engine_checks_probes_use_names_that_exist(engine: CheckedEngine) -> None:
    """In every environment, as most have only one of the engines."""
    for program in (engine.probe, engine.model_probe):
        nodes, modules = list(ast.walk(ast.parse(program))), dict[str, str]()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cornplug"):
                wanted = {alias.name for alias in node.names}
                assert wanted <= names_in(str(node.module))
                modules |= {name: f"{node.module}.{name}" for name in wanted}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id, "")
                assert not module or node.attr in names_in(module), f"{module}.{node.attr}"


@pytest.mark.more
@pytest.mark.parametrize("engine", HERE, ids=lambda engine: engine.name)
def test_engine_checks_engine_process_finds_the_plugin(engine: CheckedEngine) -> None:
    finding, *more = engine_checks.check_plugin(engine)
    assert (finding.status, finding.what) == ("ok", f"found and registered by a process of {engine.label}")
    assert {f.status for f in more} <= {"warn"}


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_plugin_left_out_by_the_environment(engine: CheckedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.allow_variable, "other,another")
    (finding,) = engine_checks.check_plugin(engine)
    assert (finding.status, engine.allow_variable in finding.remedy) == ("fail", True)


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_plugin_without_entry_point(engine: CheckedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    none = importlib.metadata.EntryPoints(())
    monkeypatch.setattr(engine_checks, "entry_points", lambda **_: none)
    (finding,) = engine_checks.check_plugin(engine)
    assert (finding.status, "does not exist" in finding.what) == ("fail", True)


def test_plugin_that_dies_is_quoted() -> None:
    (finding,) = engine_checks.check_plugin(replace(SGLANG, probe=said("Traceback", 1)))
    assert (finding.status, "no such hook here" in finding.what) == ("fail", True)


def test_plugin_that_says_why_not() -> None:
    (finding,) = engine_checks.check_plugin(replace(SGLANG, probe=said('{"why_not": "no seam"}')))
    assert (finding.status, "no seam" in finding.what) == ("fail", True)


def test_engine_checks_cache_that_cannot_hand_on_is_a_warning() -> None:
    answer = '{"why_not": "", "cache": "there is no GPU here"}'
    ok, warning = engine_checks.check_plugin(replace(SGLANG, probe=said(answer)))
    assert (ok.status, warning.status, warning.check) == ("ok", "warn", "sglang cache")
    assert "CORNPLUG_ENGINE_SHARE_KV" in warning.remedy


def test_engine_checks_hanging_probe_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "_PROBE_TIMEOUT_S", 0.5)
    (finding,) = engine_checks.check_plugin(replace(VLLM, probe="import time; time.sleep(60)"))
    assert (finding.status, "took more than 0.5 s" in finding.what) == ("fail", True)


@pytest.mark.parametrize(
    "segments", ["", "max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"]
)
def test_engine_checks_allocator_without_connectors_fails(
    segments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VersionRange, "installed_version", lambda _: "0.32.0")
    found = list(engine_checks.check_allocator({"PYTORCH_CUDA_ALLOC_CONF": segments}))
    assert bool(found) is segments.startswith("expandable")
    assert all(f.status == "warn" and "expandable_segments:True" in f.remedy for f in found)


VERDICTS = json.dumps(
    [
        {"what": "KV", "shared": False, "why": "2 cache groups", "remedy": "--one-group"},
        {"what": "embeddings", "shared": True},
    ]
)


def test_engine_checks_sharing_is_what_the_engine_says() -> None:
    """A model probe gets model and flags; what it says is the table, whatever its engine logs before it."""
    program = f"import sys; print('INFO'); assert sys.argv[1:] == ['/m', '--tp', '2']; print({VERDICTS!r})"
    kv, embeddings = engine_checks.check_sharing(replace(VLLM, model_probe=program), "/m", ["--tp", "2"])
    assert (kv.status, kv.check, kv.remedy) == ("warn", "vllm shares", "--one-group")
    assert kv.what == "/m: KV not shared: 2 cache groups"
    assert (embeddings.status, embeddings.what) == ("ok", "/m: embeddings shared")


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        (SharingVerdict(what="embeddings", shared=False, why=NO_TOWER), "ok"),
        (SharingVerdict(what="embeddings", shared=False, why="not compared"), "warn"),
        (SharingVerdict(what="KV", shared=None, why="no meta device"), "warn"),
    ],
)
def test_engine_checks_sharing_warns_of_what_is_lost(verdict: SharingVerdict, status: str) -> None:
    program = said(encode_verdicts([verdict]))
    (finding,) = engine_checks.check_sharing(replace(VLLM, model_probe=program), "/m", ())
    assert (finding.status, verdict.why in finding.what) == (status, True)


def test_engine_checks_model_probe_that_dies_is_a_warning() -> None:
    (finding,) = engine_checks.check_sharing(replace(VLLM, model_probe=said("Segmentation", 3)), "/m", ())
    assert (finding.status, "no such hook here" in finding.what) == ("warn", True)


def test_engine_checks_flags_that_the_engine_refuses_fail() -> None:
    refuses = replace(
        VLLM, model_probe="import sys; print('vllm: error: no --tq', file=sys.stderr); sys.exit(2)"
    )
    (finding,) = engine_checks.check_sharing(refuses, "/m", ["--tq", "2"])
    assert (finding.status, finding.what) == ("fail", "/m: vLLM rejects --tq 2: vllm: error: no --tq")


def test_engine_checks_engines_of_this_environment_are_of_tested_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"vllm": "0.32.1", "sglang": "0.5.23"}
    monkeypatch.setattr(VersionRange, "installed_version", lambda self: installed[self.package])
    assert engine_checks.installed_engines() == [VLLM, SGLANG]
    assert engine_checks.installed_engines("sglang") == [SGLANG]
    installed["sglang"] = "0.5.1"
    assert engine_checks.installed_engines() == [VLLM]
    assert engine_checks.installed_engines("sglang") == []


def test_engine_checks_slow_model_probe_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "_MODEL_PROBE_TIMEOUT_S", 0.5)
    slow = replace(VLLM, model_probe="import time; time.sleep(60)")
    (finding,) = engine_checks.check_sharing(slow, "/m", ())
    assert (finding.status, "took more than 0.5 s" in finding.what) == ("warn", True)
