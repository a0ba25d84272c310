"""A release has one version, nothing unlisted in the sdist, and no upload before it is switched on."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest
import release_checks
import yaml
from hatchling.builders.sdist import SdistBuilder

import cornplug

TREE: Final = Path(__file__).parents[1]


@pytest.fixture
def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((TREE / ".github" / "workflows" / "release.yml").read_text())
    return found


def steps(job: dict[str, Any]) -> list[str]:
    """Action or command of each step."""
    return [step.get("uses") or step["run"] for step in job["steps"]]


def test_release_version_is_the_packages_own_and_the_changelogs_last() -> None:
    assert release_checks.version() == cornplug.__version__
    headings = [
        line.split()[1] for line in (TREE / "CHANGELOG.md").read_text().splitlines() if line[:4] == "## ["
    ]
    assert headings[:2] == ["[Unreleased]", f"[{cornplug.__version__}]"]


def test_release_version_stands_in_no_other_file_of_the_package() -> None:
    files = [*(TREE / "cornplug").rglob("*.py"), TREE / "pyproject.toml"]
    found = [str(f.relative_to(TREE)) for f in files if f'"{cornplug.__version__}"' in f.read_text()]
    assert found == ["cornplug/__init__.py"]


@pytest.mark.more
def test_release_sdist_would_have_listed_files_only() -> None:
    included = [file.distribution_path for file in SdistBuilder(str(TREE)).recurse_included_files()]
    assert {"README.md", "LICENSE", "cornplug/__init__.py"} <= set(included)
    assert release_checks.unlisted(included) == []
    assert not any("__pycache__" in name or name.startswith((".venv", "dist/")) for name in included)


def test_release_sdist_with_a_strange_file_or_without_a_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("private")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "notes.txt", "cornplug-9/notes.txt")
        tar.add(tmp_path / "notes.txt", "cornplug-9/cornplug/a.py")
    problems = release_checks.check_sdist(tmp_path / "x.tar.gz")
    assert "notes.txt is not listed" in problems
    assert "devkit/ is missing" in problems
    assert not any("cornplug" in problem for problem in problems)
    assert release_checks.main(["sdist", str(tmp_path / "x.tar.gz")]) == 1


def test_release_sbom_without_a_requirement_is_refused() -> None:
    names = [
        "httpx",
        "huggingface_hub",
        "msgspec",
        "numpy",
        "pillow",
        "prometheus_client",
        "pydantic",
        "rich",
        "xxhash",
    ]
    sbom = {"metadata": {"component": {"name": "cornplug"}}, "components": [{"name": name} for name in names]}
    assert release_checks.complete_sbom(sbom)["metadata"]["component"]["version"] == cornplug.__version__
    sbom["components"] = [{"name": name} for name in names if name != "xxhash"]
    with pytest.raises(ValueError, match="lacks xxhash"):
        release_checks.complete_sbom(sbom)


def test_release_workflow_builds_a_tag_by_the_script(workflow: dict[Any, Any]) -> None:
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as a truth
    build = workflow["jobs"]["build"]
    assert 'script/release --tag "$GITHUB_REF_NAME"' in steps(build)
    assert build["permissions"] == {"contents": "read"}
    assert workflow["permissions"] == {}


def test_release_workflow_publishes_by_identity_once_it_is_switched_on(workflow: dict[Any, Any]) -> None:
    publish = workflow["jobs"]["publish"]
    assert publish["if"] == "${{ vars.PUBLISH_TO_PYPI == 'true' }}"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert steps(publish)[-1].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in (TREE / ".github" / "workflows" / "release.yml").read_text()


def test_release_script_wrong_argument_ends_before_any_build() -> None:
    done = subprocess.run(
        [TREE / "script" / "release", "--upload"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert os.access(TREE / "script" / "release", os.X_OK)
    assert "usage: script/release" in done.stderr
