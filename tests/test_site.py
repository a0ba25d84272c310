"""The docs site builds without a warning, loads nothing from other hosts, and has no broken link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TREE = Path(__file__).parents[1]


def build(folder: Path, *, tree: Path = TREE) -> subprocess.CompletedProcess[str]:
    """Build the site of a tree into a folder."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=tree,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link)\b[^>]*?\b(?:src|href)=[\"']?(https?://[^\"' >]+)")
    found = {(page.name, url) for page in site.rglob("*.html") for url in loads.findall(page.read_text())}
    assert not {url for _, url in found if "canonical" not in url}


def test_site_contains_linked_files_outside_docs(site: Path) -> None:
    for name in (
        "ARCHITECTURE/index.html",
        "examples/plan_and_launch/index.html",
        "examples/encoder_client.py",
    ):
        assert (site / name).is_file(), name


@pytest.mark.parametrize("link", ["nowhere.md", "limits.md#no-such-heading"])
def test_site_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "script").mkdir()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    settings = yaml.load((TREE / "mkdocs.yml").read_text(), Loader=yaml.UnsafeLoader)
    settings |= {
        "nav": [{"Home": "index.md"}, {"Limits": "limits.md"}],
        "theme": {"name": "mkdocs"},
        "extra_css": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.dump(settings))
    hooks = (TREE / "script/site_hooks.py").read_text()
    (tmp_path / "script/site_hooks.py").write_text(
        re.sub(r"_LISTED: Final = \(.*?\)", "_LISTED: Final = ()", hooks)
    )
    (tmp_path / "docs/limits.md").write_text("# Limits\n")
    (tmp_path / "docs/index.md").write_text(f"# Home\n\n[a link]({link})\n")
    done = build(tmp_path / "site", tree=tmp_path)
    assert done.returncode == 1
    assert link.partition("#")[0] in done.stdout + done.stderr
