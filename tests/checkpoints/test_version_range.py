"""The range of an engine's releases that cornplug runs beside."""

from __future__ import annotations

import importlib.metadata
from unittest import mock

import pytest

from cornplug.checkpoints.tested_releases import VersionRange

TWO = VersionRange("vLLM", "vllm", (0, 32), (0, 33))
THREE = VersionRange("SGLang", "sglang", (0, 5, 23), (0, 5, 24))


@pytest.mark.parametrize(
    ("versions", "version", "inside"),
    [
        *((TWO, v, True) for v in ("0.32.0", "0.32.7+cpu", "0.32", "0.32rc1", "0.32.1.dev3+gabc")),
        *((TWO, v, False) for v in ("0.33.0", "0.31.2", "1.0.0", "0.99rc1", "dev", "")),
        *((THREE, v, True) for v in ("0.5.23", "0.5.23.post1")),
        *((THREE, v, False) for v in ("0.5.22", "0.5.24", "0.6.0", "0.5")),
    ],
)
def test_version_range_contains_only_releases_between_bounds(
    versions: VersionRange, version: str, inside: bool
) -> None:
    assert (version in versions) is inside


@pytest.mark.parametrize(("versions", "text"), [(TWO, ">=0.32,<0.33"), (THREE, ">=0.5.23,<0.5.24")])
def test_version_range_str_is_pips_specifier(versions: VersionRange, text: str) -> None:
    assert str(versions) == text


def test_refusal_inside_range_is_empty() -> None:
    with mock.patch.object(importlib.metadata, "version", return_value="0.32.4"):
        assert TWO.explain_mismatch() == ""


def test_refusal_outside_range_names_version_and_range() -> None:
    with mock.patch.object(importlib.metadata, "version", return_value="0.33.1"):
        assert TWO.explain_mismatch() == (
            "vLLM 0.33.1 is outside the tested range >=0.32,<0.33; "
            "install a release of cornplug that supports it"
        )


def test_refusal_without_engine_names_no_version() -> None:
    missing = importlib.metadata.PackageNotFoundError
    with mock.patch.object(importlib.metadata, "version", side_effect=missing):
        assert TWO.installed_version() is None
        assert TWO.explain_mismatch().startswith("vLLM None is outside")
