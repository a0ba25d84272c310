"""The generated pages of docs/ say what the code says, and every reason has a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_docs
from reasons_of_code import Reasons
from reference_docs import configuration, metrics, troubleshooting

from cornplug.config import ClassConfig, Config
from cornplug.metrics import LABELS

TREE = Path(__file__).parents[1]


@pytest.mark.parametrize("name", list(reference_docs.PAGES))
def test_docs_reference_generated_page_equals_the_code(name: str) -> None:
    written = (TREE / "docs" / name).read_text()
    assert written == reference_docs.PAGES[name](), f"docs/{name} is out of date: run script/docs"


@pytest.mark.parametrize(
    "model", [*(f.annotation for f in Config.model_fields.values()), ClassConfig], ids=lambda m: m.__name__
)
def test_docs_reference_every_setting_has_a_sentence(model: type) -> None:
    for name, text in configuration.descriptions(model).items():
        assert text.endswith("."), f"{model.__name__}.{name} needs a docstring: one sentence, subject first"


def test_docs_reference_serve_store_flags_are_its_own() -> None:
    assert set(configuration._STORE_FLAGS.values()) <= configuration.store_flags()


def test_docs_reference_every_label_has_a_meaning() -> None:
    used = {
        label
        for series in (metrics.engines(), metrics.service(), metrics.store(), metrics.admission())
        for one in series
        for label in one.labels
    }
    assert used == set(LABELS)


def test_docs_reference_every_reason_has_a_remedy() -> None:
    known = {word for section in troubleshooting.reasons().values() for word in section}
    found = Reasons(TREE / "cornplug")
    missing = {word: place for word, place in found.words.items() if word not in known}
    assert not missing, "add these to docs/reasons.toml"
    assert not known - found.words.keys(), "docs/reasons.toml has words that the code no longer says"
    assert not found.untraced, "a counted word that tests/reasons_of_code.py cannot follow"


def test_docs_reference_new_reason_without_remedy_is_found(tmp_path: Path) -> None:
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


def test_docs_reference_each_reason_is_in_one_section() -> None:
    sections = troubleshooting.reasons()
    words = [word for section in sections.values() for word in section]
    assert len(words) == len(set(words))
    for section in sections.values():
        for word, said in section.items():
            assert said.meaning.endswith("."), word
            assert said.remedy.endswith("."), word
