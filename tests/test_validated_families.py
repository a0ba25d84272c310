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

from cornplug.checkpoints.validated_families import VALIDATED, VALIDATED_OF_VIDEO, VALIDATED_OWN
from cornplug.sglang_hooks import compat as sglang_room
from cornplug.vllm_connector import compat as vllm_room
from devkit.family_trials import trial_environment

TREE = Path(__file__).parents[1]


def written(tmp_path: Path, results: Sequence[tuple[str, str, str, bool]]) -> dict[str, frozenset[str]]:
    """VALIDATED of a page made of (engine, release, family, passed)."""
    names = ("engine", "release", "promise", "passed")
    lines = [{"section": generated.SECTION, **dict(zip(names, result, strict=True))} for result in results]
    other = {**lines[0], "section": "Faults", "promise": "store is killed"}
    found: dict[str, frozenset[str]] = page(tmp_path, [*lines, other])["VALIDATED"]
    return found


def page(tmp_path: Path, lines: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Names of the page that is made of these recorded lines."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps(lines))
    space: dict[str, Any] = {}
    exec(compile(generated.page(file), "validated_families.py", "exec"), space)
    return space


def of_sections(tmp_path: Path, results: Sequence[tuple[str, str, str, bool]]) -> dict[str, Any]:
    """As `page`, of (section, engine, promise, passed)."""
    names = ("section", "engine", "promise", "passed")
    return page(tmp_path, [dict(zip(names, result, strict=True)) for result in results])


def test_validated_families_have_passed_and_failed_nowhere(tmp_path: Path) -> None:
    results = [
        ("vllm", "0.32.0", "llava", True),
        ("vllm", "0.33.0", "llava", True),
        ("vllm", "0.32.0", "gemma3", True),
        ("vllm", "0.33.0", "gemma3", False),
        ("vllm", "0.32.0", "internvl", False),
        ("sglang", "0.5.23", "qwen2_vl", True),
    ]
    assert written(tmp_path, results) == {"vllm": {"llava"}, "sglang": {"qwen2_vl"}}


def test_validated_families_of_video_are_of_videos_alone(tmp_path: Path) -> None:
    results = [
        (generated.SECTION, "vllm", "llava", True),
        (generated.SECTION, "vllm", "qwen2_vl", True),
        (generated.VIDEOS, "vllm", "qwen2_vl", True),
        (generated.VIDEOS, "vllm", "qwen3_vl", True),
        (generated.VIDEOS, "vllm", "qwen3_vl", False),
    ]
    space = of_sections(tmp_path, results)
    assert space["VALIDATED"] == {"vllm": {"llava", "qwen2_vl"}, "sglang": frozenset()}
    assert space["VALIDATED_OF_VIDEO"] == {"vllm": {"qwen2_vl"}, "sglang": frozenset()}


def test_validated_families_of_own_towers_are_by_modality(tmp_path: Path) -> None:
    results = [
        (generated.SECTION, "sglang", "qwen2_vl", True),
        (generated.OWN, "sglang", "qwen2_audio, audio", True),
        (generated.OWN, "sglang", "gemma3, image", True),
        (generated.OWN, "sglang", "gemma3, image", True),
        (generated.OWN, "sglang", "gemma3n, image", True),
        (generated.OWN, "sglang", "gemma3n, image", False),
    ]
    space = of_sections(tmp_path, results)
    assert space["VALIDATED"]["sglang"] == {"qwen2_vl"}
    own = {"image": {"gemma3"}, "audio": {"qwen2_audio"}, "video": frozenset()}
    assert space["VALIDATED_OWN"] == {"sglang": own}


def test_validated_families_are_the_rooms() -> None:
    assert vllm_room.VALIDATED_FAMILIES == VALIDATED["vllm"] >= {"llava", "qwen2_vl"}
    assert sglang_room.VALIDATED_FAMILIES == VALIDATED["sglang"] >= {"qwen2_vl"}
    assert vllm_room.VALIDATED_VIDEOS == VALIDATED_OF_VIDEO["vllm"] <= VALIDATED["vllm"]
    assert not VALIDATED_OF_VIDEO["sglang"]
    assert VALIDATED_OWN["sglang"] == sglang_room.OWN_TOWERS


def test_trial_environment_shares_an_own_tower_in_its_processes_only(tmp_path: Path) -> None:
    ask = "from cornplug.sglang_hooks.compat import OWN_TOWERS as o; print(*sorted(o['audio']))"
    trial = trial_environment(tmp_path, (), own={"audio": {"gemma3n"}, "image": set()})
    paths = os.pathsep.join([trial["PYTHONPATH"], str(TREE)])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {*VALIDATED_OWN["sglang"]["audio"], "gemma3n"}
    assert trial_environment(tmp_path, (), own={"audio": set()}) == {}


@pytest.mark.parametrize("families", [(), ("paligemma",)])
def test_trial_environment_shares_a_family_in_its_processes_only(
    families: tuple[str, ...], tmp_path: Path
) -> None:
    ask = (
        "from cornplug.vllm_connector.compat import VALIDATED_FAMILIES as v, VALIDATED_VIDEOS as w;"
        "print(*sorted(v), '|', *sorted(w))"
    )
    paths = os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH")]))
    trial = trial_environment(tmp_path, families)
    env = {**os.environ, "PYTHONPATH": paths}
    if trial:
        env["PYTHONPATH"] = os.pathsep.join([trial["PYTHONPATH"], paths])
    done = subprocess.run(
        [sys.executable, "-P", "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    images, _, videos = done.stdout.partition("|")
    assert set(images.split()) == {*VALIDATED["vllm"], *families}
    assert set(videos.split()) == {*VALIDATED_OF_VIDEO["vllm"], *families}
