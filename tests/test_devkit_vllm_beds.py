"""Beds: the environments that put vLLM on another runner, KV layout or release."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devkit import vllm_beds
from devkit.vllm_beds import BEDS, bed_environment


def test_bed_environment_without_a_name_is_vllm_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_beds.VARIABLE, raising=False)
    assert bed_environment() == {}


def test_bed_environment_named_by_variable_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_beds, "_PACKAGES", tmp_path)
    monkeypatch.setenv(vllm_beds.VARIABLE, "v2-gpu")
    monkeypatch.setenv("PYTHONPATH", "before")
    for package in BEDS["v2-gpu"][1]:
        (tmp_path / package).mkdir()
    env = bed_environment()
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert env["PYTHONPATH"].split(os.pathsep) == [*(str(tmp_path / p) for p in BEDS["v2-gpu"][1]), "before"]


def test_bed_environment_unknown_bed_names_the_others() -> None:
    with pytest.raises(ValueError, match="v3: there are v1, v1-one, v2, v2-gpu"):
        bed_environment("v3")


def test_bed_environment_without_set_up_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_beds, "_PACKAGES", tmp_path)
    with pytest.raises(FileNotFoundError, match="Run: script/setup"):
        bed_environment("v2")
