"""Each example has a short README whose commands exist, a TOML file without error, and a script."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import test_docs

from cornplug import cli
from cornplug.apps import AppsFile
from cornplug.planner.inputs import toml_reader
from devkit.engines import Answer

TREE: Final = Path(__file__).parents[1]
EXAMPLES: Final = sorted(path.parent for path in (TREE / "examples").glob("*/demo.py"))
PLANNED: Final = "plan_and_launch"
MOST_LINES: Final = 40
EACH: Final = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


def commands(readme: str) -> list[list[str]]:
    """Words of each command in a README's blocks and backticks."""
    text = readme.replace("\\\n", " ")
    lines = [
        line for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()
    ]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [
        shlex.split(line, comments=True)
        for line in lines
        if re.match(r"(cornplug \S|script/|vllm serve \S)", line)
    ]


def unknown_words(words: list[str]) -> list[str]:
    """Commands and flags of one line that do not exist."""
    reference = (TREE / "docs" / "command-line.md").read_text()
    if words[0].startswith("script/"):
        return [] if (TREE / words[0]).exists() else [words[0]]
    if words[0] == "vllm":
        settings = (TREE / "docs" / "configuration.md").read_text()
        named = [word for word in words if word.startswith("--cornplug")]
        return [flag for flag in named if f"`{flag}`" not in settings]
    if words[1] not in cli.COMMANDS:
        return [words[1]]
    parts = re.split(r"^## ", reference, flags=re.M)
    of_it = " ".join(part for part in parts if re.match(rf"`cornplug {words[1]}\b", part))
    own = words[: words.index("--")] if "--" in words else words  # an engine's follow
    flags = [word.partition("=")[0] for word in own if word.startswith("--")]
    return [flag for flag in flags if not re.search(rf"{flag}\b(?!-)", of_it)]


def test_examples_folders_are_those_with_a_script() -> None:
    folders = sorted(path for path in (TREE / "examples").iterdir() if path.is_dir())
    assert [path for path in folders if any(path.glob("*"))] == EXAMPLES
    assert len(EXAMPLES) > 4


@EACH
def test_example_readme_is_short_and_its_links_lead_somewhere(example: Path) -> None:
    readme = (example / "README.md").read_text()
    assert len(readme.splitlines()) <= MOST_LINES
    for target in test_docs.links(readme):
        file, _, anchor = target.partition("#")
        there = (example / file).resolve()
        assert there.exists(), target
        assert not anchor or anchor in test_docs.anchors(there), target


@EACH
def test_example_readme_commands_exist(example: Path) -> None:
    found = commands((example / "README.md").read_text())
    assert any(words[0] == "script/demo" for words in found)
    assert any(words[0] == "cornplug" for words in found)
    assert {" ".join(words): unknown_words(words) for words in found if unknown_words(words)} == {}


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("cornplug lunch apps.toml", ["lunch"]),
        ("cornplug launch apps.toml --dry", ["--dry"]),
        ("cornplug launch apps.toml --dry-run", []),
        ("vllm serve M --kv-connector cornplug --cornplug-store-sise 1", ["--cornplug-store-sise"]),
        ("script/demonstrate", ["script/demonstrate"]),
    ],
)
def test_example_readme_command_that_does_not_exist_is_seen(line: str, unknown: list[str]) -> None:
    (words,) = commands(f"```\n{line}\n```\n")
    assert unknown_words(words) == unknown


@EACH
def test_example_readme_and_script_demo_name_each_other(example: Path) -> None:
    usage = (TREE / "script" / "demo").read_text().partition("set -euo")[0]
    assert re.search(
        rf"script/demo +{example.name} " if example.name != "two_apps_one_encoder" else "script/demo  ", usage
    )
    default = example.name == "two_apps_one_encoder"
    words = ["script/demo"] if default else ["script/demo", example.name]
    assert words in [found[:2] for found in commands((example / "README.md").read_text())]


@EACH
def test_example_apps_file_is_launched_as_it_says(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(example.glob("*.toml"))
    assert files
    if example.name == PLANNED:
        assert [toml_reader.read(file).name for file in files] == ["hand-made", "four-services"]
        return
    (file,) = files
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    assert cli.main(["launch", str(file), "--dry-run", "--run-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    started = [c.name for c in AppsFile.read(file).components if c.resources is not None]
    assert sorted(re.findall(r"^# (?:engine|encoder|external) (.+)$", shown, re.M)) == sorted(started)
    assert shown.count("# store store") == 1
    assert shown.count("CORNPLUG_STORE_AUTOSTART=false") == shown.count("# engine ")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"cornplug_s": 1.0}, "1.00 s, and stock takes 1.00 s"),
        ({"tokens": 0}, "nothing was shared"),
        ({"token_ids": (2,)}, "another answer than stock's"),
        ({"tower_passes": 1}, "the tower ran again for a known image"),
    ],
)
def test_demo_fails_if_a_row_is_wrong(
    change: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TREE / "examples/two_apps_one_encoder"))
    demo = importlib.import_module("demo")
    wrong = {"cornplug_s": 0.2, "tokens": 1500, "token_ids": (1,), "tower_passes": 0, **change}

    def answer(token_ids: tuple[int, ...], ttft_s: float) -> Answer:
        return Answer(
            text="",
            token_ids=token_ids,
            logprobs=(),
            prompt_tokens=1500,
            finish_reason="length",
            ttft_s=ttft_s,
            total_s=2 * ttft_s,
        )

    sample = demo.Sample(
        stock=answer((1,), 1.0),
        cornplug=answer(wrong["token_ids"], wrong["cornplug_s"]),
        embeddings=0,
        tower_passes=wrong["tower_passes"],
        tokens=wrong["tokens"],
    )
    results = demo.Results({demo.FRESH: [sample] * demo.ROUNDS})
    assert results.faults() == ([f"{demo.FRESH}: {fault}"] if fault else [])
