"""Generated pages of docs/ equal their generator, and every reason is documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_docs
from reasons_of_code import Reasons
from reference_docs import metrics, troubleshooting

from cornplug.metrics import LABELS

TREE = Path(__file__).parents[1]


@pytest.mark.parametrize("name", list(reference_docs.PAGES))
def test_docs_generated_page_is_current(name: str) -> None:
    written = (TREE / "docs" / name).read_text()
    assert written == reference_docs.PAGES[name](), f"docs/{name} is out of date: run script/docs"


def test_docs_every_metric_label_is_documented() -> None:
    used = {
        label
        for series in (metrics.engines(), metrics.service(), metrics.store(), metrics.admission())
        for one in series
        for label in one.labels
    }
    assert used == set(LABELS)


def test_docs_every_reason_is_documented() -> None:
    known = {word for section in troubleshooting.reasons().values() for word in section}
    found = Reasons(TREE / "cornplug")
    missing = {word: place for word, place in found.words.items() if word not in known}
    assert not missing, "add these to docs/reasons.toml"
    assert not known - found.words.keys(), "docs/reasons.toml has words that the code no longer says"
    assert not found.untraced, "a counted word that tests/reasons_of_code.py cannot follow"


def test_reasons_finds_reasons_in_code(tmp_path: Path) -> None:
    room = tmp_path / "cornplug"
    room.mkdir()
    (room / "a.py").write_text(
        "def _miss(reason): pass\n"
        "_miss('by_argument')\n"
        "raise CodecError('x', reason='by_keyword' if late else 'otherwise')\n"
        "outcomes['by_key'] += 1\n"
        "tally.count('cornplug_misses_total', app, WHAT, 'counted')\n"
        "tally.count('cornplug_misses_total', app, WHAT, computed())\n"
    )
    found = Reasons(room)
    assert set(found.words) == {"by_argument", "by_keyword", "otherwise", "by_key", "counted"}
    assert found.untraced == ["a.py:6: computed()"]
