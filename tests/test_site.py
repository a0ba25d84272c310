"""The docs site: it builds without a warning, from docs/ alone, and a broken link stops it."""

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
    """The site of a tree, built into a folder."""
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
    """A folder with the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_site_front_page_shows_the_demo_before_anything_else(site: Path) -> None:
    page = (site / "index.html").read_text()
    content = page[page.index("<article") : page.index("</article")]
    assert re.findall(r"<(table|h2|pre|ul)\b", content)[0] == "table"
    assert "embedding from" in content[: content.index("</thead>")]


def test_site_no_page_loads_from_another_host(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link)\b[^>]*?\b(?:src|href)=[\"']?(https?://[^\"' >]+)")
    found = {(page.name, url) for page in site.rglob("*.html") for url in loads.findall(page.read_text())}
    assert not {url for _, url in found if "canonical" not in url}


def test_site_links_beyond_docs_are_in_it(site: Path) -> None:
    for name in (
        "ARCHITECTURE/index.html",
        "examples/plan_and_launch/index.html",
        "examples/encoder_client.py",
    ):
        assert (site / name).is_file(), name


def test_site_every_page_has_a_place_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (TREE / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert {page.name for page in (TREE / "docs").glob("*.md")} <= named


@pytest.mark.parametrize("link", ["nowhere.md", "limits.md#no-such-heading", "../benchmarks/results"])
def test_site_link_that_leads_nowhere_stops_the_build(tmp_path: Path, link: str) -> None:
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
