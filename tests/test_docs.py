"""The documents: short enough, their paths exist, and their language names its nouns."""

from __future__ import annotations

import re
from pathlib import Path

import language
import pytest

TREE = Path(__file__).parents[1]
PAGES = [TREE / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += sorted((TREE / "docs").glob("*.md"))
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
EACH_HABIT = pytest.mark.parametrize("habit", language.HABITS)
MOST_WORDS = 700
OF_DOCUMENTS, OF_DOCSTRINGS = 10, 20
"""Allowances per 10,000 words."""


def words(text: str) -> int:
    """Number of words of a page as `wc -w` counts them: code, table rules and signs included."""
    return len(text.split())


def paths(text: str) -> set[str]:
    """Paths of the checkout that a page names in backticks."""
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


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_readme_and_architecture_have_at_most_700_words(name: str) -> None:
    assert words((TREE / name).read_text()) <= MOST_WORDS


@EACH_PAGE
def test_docs_every_path_of_a_page_exists(page: Path) -> None:
    missing = {path for path in paths(page.read_text()) if not list(TREE.glob(path.rstrip("/")))}
    assert not missing


@EACH_PAGE
def test_docs_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in links(page.read_text()):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_docs_path_and_link_that_do_not_exist_are_seen() -> None:
    text = (
        "`cornplug/no/such.py` and [this](nowhere.md#at-all), not `cornplug encoder` nor [x](https://e.org)"
    )
    assert paths(text) == {"cornplug/no/such.py"}
    assert links(text) == {"nowhere.md#at-all"}


def test_docs_every_page_is_linked_from_readme_or_the_docs_first_page() -> None:
    linked = {
        (front.parent / target.partition("#")[0]).resolve().relative_to(TREE).as_posix()
        for front in (TREE / "README.md", TREE / "docs" / "index.md")
        for target in links(front.read_text())
    }
    unlinked = {page.relative_to(TREE).as_posix() for page in PAGES} - linked - {"README.md"}
    assert not unlinked


@EACH_HABIT
def test_docs_documents_name_their_nouns(habit: str) -> None:
    text = "\n".join(language.documents().values())
    assert language.rates(text)[habit] <= OF_DOCUMENTS, list(language.sentences(text, habit))


@EACH_HABIT
def test_docs_docstrings_of_each_package_name_their_nouns(habit: str) -> None:
    for package, text in language.docstrings(TREE / "cornplug").items():
        found = list(language.sentences(text, habit))
        assert language.rates(text)[habit] <= OF_DOCSTRINGS, f"{package}: {found}"


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        ("headless", "What is given and excludes sharing is an error."),
        ("headless", "It says what a caller may do."),
        ("nobody", "An answer that nobody waits for."),
        ("of_ours", "Models of no family of ours share nothing."),
        ("who", "Who matches nothing else is of this class."),
        ("who", "It is given to whoever asks."),
    ],
)
def test_docs_habit_of_speech_is_seen(habit: str, text: str) -> None:
    assert list(language.sentences(text, habit)) == [text]


@pytest.mark.parametrize(
    "text",
    [
        "The caller who sent it waits.",
        "What happens when it dies?",
        "The label `what` is an embedding.",
        "Flags you set explicitly are kept.",
    ],
)
def test_plain_speech_is_not_taken_for_a_habit(text: str) -> None:
    said = language.prose(text)
    assert not [habit for habit in language.HABITS if list(language.sentences(said, habit))]
