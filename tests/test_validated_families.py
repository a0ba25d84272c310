"""The families that engines share: those of recorded test results, and of a trial in its processes only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference_docs import validated_families as generated

from cornplug.checkpoints.tested_releases import VALIDATED, compared_families
from cornplug.sglang_hooks import compat as sglang_room
from cornplug.vllm_connector import compat as vllm_room
from devkit.family_trials import trial_environment

TREE = Path(__file__).parents[1]
NAMES = ("section", "engine", "release", "dtype", "promise", "passed")


def page(tmp_path: Path, results: Sequence[Sequence[object]]) -> Mapping[str, Any]:
    """The names in the module that is generated from results with the values of `NAMES`."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps([dict(zip(NAMES, result, strict=True)) for result in results]))
    space: dict[str, Any] = {}
    exec(compile(generated.page(file), "tested_releases.py", "exec"), space)
    return space


def test_validated_families_are_of_a_release_and_dtype(tmp_path: Path) -> None:
    images = generated.SECTION
    found = page(
        tmp_path,
        [
            (images, "vllm", "0.32.0", "float32", "llava", True),
            (images, "vllm", "0.33.0", "float32", "llava", False),
            (images, "vllm", "0.33.0", "bfloat16", "llava", True),
            (images, "sglang", "0.5.23", "float32", "qwen2_vl", True),
            ("Faults", "vllm", "0.33.0", "float32", "the store is killed", True),
        ],
    )["compared_families"]
    assert found("vllm", "0.32.0", "float32") == {"llava"}
    assert found("vllm", "0.32.0+cpu", "float32") == {"llava"}
    assert found("vllm", "0.32.0", "bfloat16") == set()
    assert found("vllm", "0.33.0", "float32") == set()
    assert found("vllm", "0.33.0", "bfloat16") == {"llava"}
    assert found("vllm", "0.32.1", "float32") == set()
    assert found("vllm", None, "float32") == set()
    assert found("sglang", "0.5.23", "float32") == {"qwen2_vl"}


def test_validated_family_failed_on_no_bed(tmp_path: Path) -> None:
    on_a_bed = (generated.SECTION, "vllm", "0.32.0", "float32", "llava")
    assert page(tmp_path, [(*on_a_bed, True), (*on_a_bed, True)])["VALIDATED"]
    assert not page(tmp_path, [(*on_a_bed, True), (*on_a_bed, False)])["VALIDATED"]


def test_validated_families_are_by_kind(tmp_path: Path) -> None:
    results = [
        (generated.SECTION, "llava", True),
        (generated.VIDEOS, "qwen2_vl", True),
        (generated.OWN, "qwen2_audio, audio", True),
        (generated.OWN, "gemma3, image", True),
        (generated.OWN, "gemma3n, image", False),
    ]
    full = [(section, "sglang", "0.5.23", "float32", *rest) for section, *rest in results]
    found = page(tmp_path, full)["compared_families"]
    kinds = ("image", "video", "own image", "own audio", "own video")
    assert [found("sglang", "0.5.23", "float32", kind) for kind in kinds] == [
        {"llava"},
        {"qwen2_vl"},
        {"gemma3"},
        {"qwen2_audio"},
        set(),
    ]


def test_rooms_ask_for_their_release_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_room, "compared_families", lambda *asked: frozenset([asked]))
    monkeypatch.setattr(sglang_room, "compared_families", lambda *asked: frozenset([asked]))
    for room in (vllm_room, sglang_room):
        installed = room.SUPPORTED_VERSIONS.installed_version()
        (asked,) = room.validated_families("bfloat16", "video")
        assert asked == (room.SUPPORTED_VERSIONS.package, installed, "bfloat16", "video")


def test_recorded_families_are_validated() -> None:
    assert compared_families("vllm", "0.32.0", "float32") >= {"llava", "qwen2_vl"}
    assert compared_families("sglang", "0.5.23", "float32") >= {"qwen2_vl"}
    assert {kind for *_, kind, _ in VALIDATED} <= {"image", "video", "own image", "own audio", "own video"}


ASK = (
    "from cornplug.checkpoints.tested_releases import compared_families;"
    "ask = lambda kind: print(*sorted(compared_families('vllm', '0.32.0', 'float16', kind)));"
    "ask('image'); ask('video'); ask('own audio'); ask('own image')"
)


@pytest.mark.parametrize("families", [(), ("paligemma",)])
@pytest.mark.parametrize("own", [{}, {"audio": {"gemma3n"}, "image": set()}])
def test_trial_environment_shares_families_in_its_processes_only(
    families: tuple[str, ...], own: Mapping[str, set[str]], tmp_path: Path
) -> None:
    trial = trial_environment(tmp_path, families, own=own)
    assert bool(trial) == bool(families or own)
    paths = os.pathsep.join([*trial.values(), str(TREE)])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK], env=env, capture_output=True, text=True, check=True
    )
    recorded = (compared_families("vllm", "0.32.0", "float16", kind) for kind in ("image", "video"))
    images, videos = (sorted({*names, *families}) for names in recorded)
    audio = sorted(own.get("audio", ()))
    assert done.stdout.split("\n") == [" ".join(names) for names in (images, videos, audio, [], [])]
