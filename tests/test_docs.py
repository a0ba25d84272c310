"""Docs pages: the paths and links that they contain exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cornplug.checkpoints.tested_releases import VALIDATED

TREE = Path(__file__).parents[1]
PAGES = [TREE / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += sorted((TREE / "docs").glob("*.md"))
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def paths(text: str) -> set[str]:
    """Paths of the checkout that a page contains in backticks."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    code = {word for span in re.findall(r"`([^`\n]+)`", plain) for word in span.split()}
    ours = re.compile(r"(?:cornplug|tests|docs|script|benchmarks|examples|deploy|dev)/[\w./*-]*")
    return {word for word in code if ours.fullmatch(word) and "NAME" not in word}


def links(text: str) -> set[str]:
    """Targets of a page's links within the checkout, with the part after #."""
    return {target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@EACH_PAGE
def test_docs_paths_exist(page: Path) -> None:
    missing = {path for path in paths(page.read_text()) if not list(TREE.glob(path.rstrip("/")))}
    assert not missing


@EACH_PAGE
def test_docs_links_lead_somewhere(page: Path) -> None:
    for target in links(page.read_text()):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_docs_missing_path_and_link_are_found() -> None:
    text = (
        "`cornplug/no/such.py` and [this](nowhere.md#at-all), not `cornplug encoder` nor [x](https://e.org)"
    )
    assert paths(text) == {"cornplug/no/such.py"}
    assert links(text) == {"nowhere.md#at-all"}


def test_docs_pages_are_linked_from_front_pages() -> None:
    linked = {
        (front.parent / target.partition("#")[0]).resolve().relative_to(TREE).as_posix()
        for front in (TREE / "README.md", TREE / "docs" / "index.md")
        for target in links(front.read_text())
    }
    unlinked = {page.relative_to(TREE).as_posix() for page in PAGES} - linked - {"README.md"}
    assert not unlinked


NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def test_docs_counts_of_families_are_those_of_the_code() -> None:
    """README and limits.md count what the tests have compared."""
    readme, limits = (" ".join((TREE / page).read_text().split()) for page in ("README.md", "docs/limits.md"))

    def count(engine: str, kind: str) -> str:
        return NUMBERS[len({family for e, _, _, k, family in VALIDATED if (e, k) == (engine, kind)})]

    vllm, sglang = count("vllm", "image"), count("sglang", "image")
    assert f"Images of {vllm} model families in vLLM and {sglang} in SGLang" in readme
    assert f"videos of {count('vllm', 'video')} in vLLM" in readme
    assert f"{vllm} in vLLM, {sglang} in SGLang" in limits
    own = {kind: count("sglang", f"own {kind}") for kind in ("audio", "image")}
    assert f"audio of {own['audio']} more family, and images of {own['image']}, among themselves" in readme
