"""Hooks of mkdocs: files beyond docs/ that a page links are in the site, at their path in the repository.

So one link works on GitHub and on the site. A link that leads nowhere stays, and the strict build fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

TREE: Final = Path(__file__).parents[1]
_HOME: Final = {"README.md": "index.md"}
"""Repository's front page -> the site's."""
_LISTED: Final = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/plan_and_launch/README.md")
"""Files beyond docs/ that mkdocs.yml lists."""
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/, those that mkdocs.yml lists, and all that they link, directly or not."""
    known = {TREE / "docs" / file.src_uri for file in files if file.inclusion.is_included()}
    open_ends = [*known, *(TREE / name for name in _LISTED)]
    while open_ends:
        path = open_ends.pop()
        if path not in known:
            known.add(path)
            uri = _uri(path)
            if files.get_file_from_path(uri) is None:
                place = InclusionLevel.INCLUDED if uri in _LISTED else InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=place))
        if path.suffix == ".md":
            open_ends += [target for target in _targets(path) if target not in known]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links as they are between pages of the site."""
    source = Path(page.file.abs_src_path or "")
    here = os.path.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = _file(source, found[1])
        return os.path.relpath(_uri(target), here or ".") if target else found[1]

    return _LINK.sub(moved, markdown)


def _targets(page: Path) -> Iterator[Path]:
    links: Iterable[str] = _LINK.findall(page.read_text())
    yield from filter(None, (_file(page, link) for link in links))


def _file(page: Path, link: str) -> Path | None:
    """The repository's file that a link names; None for a folder, an address, a link that leads nowhere."""
    target = Path(os.path.normpath(page.parent / link))
    return target if target.is_file() and target.is_relative_to(TREE) else None


def _uri(path: Path) -> str:
    below = path.relative_to(TREE).as_posix()
    return _HOME.get(below, below.removeprefix("docs/"))
