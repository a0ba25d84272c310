"""script/land and script/record-green, in a toy repository whose script/test is a stub."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
# As script/test: `extra` stands for what happens during the run.
STUB = """#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(script/record-green --start)
{extra}
touch .venv-made
script/record-green "$tree"
"""


class ToyRepository:
    """A repository with main checked out, and a branch `topic` that adds a file."""

    def __init__(self, folder: Path) -> None:
        self.top = folder / "a repository"
        (self.top / "script").mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "Test")
        self.git("config", "user.email", "test@example.org")
        for name in ("land", "record-green"):
            shutil.copy(TREE / "script" / name, self.top / "script" / name)
        (self.top / ".gitignore").write_text(".cache/\n.venv*\n")
        self.commit("file", "first\n", test="true")
        self.git("checkout", "--quiet", "-b", "topic")
        self.commit("added", "topic\n")
        self.git("checkout", "--quiet", "main")

    def git(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.top, env=git_environment(), capture_output=True, text=True, check=check
        )
        return done.stdout.strip()

    def commit(self, name: str, text: str, test: str | None = None) -> None:
        """Commit a file, and with `test` a script/test that does this."""
        (self.top / name).write_text(text)
        if test is not None:
            (self.top / "script/test").write_text(STUB.format(extra=test))
            (self.top / "script/test").chmod(0o755)
        self.git("add", "-A")
        self.git("commit", "--quiet", "-m", f"Add {name}")

    def on_topic(self, name: str, text: str, test: str | None = None) -> None:
        self.git("checkout", "--quiet", "topic")
        self.commit(name, text, test)
        self.git("checkout", "--quiet", "main")

    def land(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            ["script/land", *words],
            cwd=self.top,
            env=git_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def main(self) -> str:
        return self.git("rev-parse", "main")

    def proven(self) -> bool:
        """Whether main's tree is recorded as tested."""
        return (self.top / ".cache/tested" / self.git("rev-parse", "main^{tree}")).exists()


def git_environment() -> dict[str, str]:
    """Without this user's git settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


@pytest.fixture
def toy(tmp_path: Path) -> ToyRepository:
    return ToyRepository(tmp_path)


def test_land_passing_branch_moves_main_and_its_checkout(toy: ToyRepository) -> None:
    before = toy.main()
    status, said = toy.land("topic")
    assert status == 0, said
    assert toy.git("rev-parse", "main^1", "main^2").split() == [before, toy.git("rev-parse", "topic")]
    assert (toy.top / "added").read_text() == "topic\n"
    assert toy.git("status", "--porcelain") == ""
    assert toy.proven()
    assert toy.land("topic") == (0, "land: main has topic already\n")


def test_land_main_checked_out_nowhere_is_moved(toy: ToyRepository) -> None:
    toy.git("checkout", "--quiet", "topic")
    (toy.top / "unrelated").touch()
    status, said = toy.land("topic")
    assert status == 0, said
    assert toy.git("rev-parse", "main^2") == toy.git("rev-parse", "topic")
    assert toy.git("branch", "--show-current") == "topic"


def test_land_from_other_worktree_records_in_the_main_one(toy: ToyRepository) -> None:
    toy.git("worktree", "add", "--quiet", "../other", "topic")
    done = subprocess.run(["../other/script/land", "topic"], cwd=toy.top, env=git_environment(), check=False)
    assert done.returncode == 0
    assert toy.proven()


def test_land_scratch_worktree_keeps_environments(toy: ToyRepository) -> None:
    toy.land("topic")
    toy.on_topic("second", "2\n", test="test -e .venv-made && test ! -e untracked && touch untracked")
    assert toy.land("topic")[0] == 0
    shutil.rmtree(toy.top / ".cache/land")
    toy.on_topic("third", "3\n", test="test ! -e .venv-made")
    assert toy.land("topic")[0] == 0


def test_land_failing_branch_leaves_main(toy: ToyRepository) -> None:
    toy.on_topic("broken", "1\n", test="false")
    before = toy.main()
    status, said = toy.land("topic")
    assert (status, toy.main()) == (1, before)
    assert "script/test failed" in said
    assert not (toy.top / ".cache/tested").exists()


def test_land_conflict_names_the_files(toy: ToyRepository) -> None:
    toy.on_topic("file", "topic\n")
    toy.commit("file", "main\n")
    before = toy.main()
    status, said = toy.land("topic")
    assert (status, toy.main()) == (1, before)
    assert said.endswith("land: topic conflicts with main. Merge main into topic and resolve:\nland: file\n")
    toy.git("reset", "--quiet", "--hard", "HEAD~1")
    assert toy.land("topic")[0] == 0


def test_land_main_moved_during_tests_is_left(toy: ToyRepository) -> None:
    toy.on_topic("slow", "1\n", test="git -C ../.. commit --quiet --allow-empty -m moved")
    status, said = toy.land("topic")
    assert status == 1
    assert "main moved during the tests" in said
    assert toy.git("log", "-1", "--format=%s", "main") == "moved"


@pytest.mark.parametrize("name", ["file", "untracked"])
def test_land_dirty_checkout_of_main_is_refused(toy: ToyRepository, name: str) -> None:
    (toy.top / name).write_text("changed\n")
    status, said = toy.land("topic")
    assert status == 1
    assert "uncommitted files" in said
    assert not (toy.top / ".cache/land").exists()


def test_land_while_another_runs_is_refused(toy: ToyRepository) -> None:
    (toy.top / ".cache").mkdir()
    lock = toy.top / ".cache/land.lock"
    with subprocess.Popen(["flock", lock, "sh", "-c", "echo locked; cat"], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert toy.land("topic") == (1, "land: another landing is running\n")
        holder.communicate()


@pytest.mark.parametrize(
    ("words", "expected"), [((), 2), (("--help",), 0), (("a", "b"), 2), (("absent",), 1)]
)
def test_land_wrong_usage_is_explained(toy: ToyRepository, words: tuple[str, ...], expected: int) -> None:
    status, said = toy.land(*words)
    assert status == expected
    assert "script/land BRANCH" in said or "there is no branch absent" in said


@pytest.mark.parametrize(
    ("extra", "recorded"),
    [
        ("true", True),
        ("mkdir docs && touch docs/support-matrix.json", True),
        ("touch untracked", False),
        ("echo changed >file", False),
        ("git commit --quiet --allow-empty -m same; git rm --quiet file; git commit --quiet -m other", False),
    ],
)
def test_land_record_of_changed_files_is_refused(toy: ToyRepository, extra: str, recorded: bool) -> None:
    toy.commit("next", "1\n", test=extra)
    subprocess.run(["script/test"], cwd=toy.top, env=git_environment(), check=True)
    assert (toy.top / ".cache/tested").exists() == recorded


@pytest.mark.parametrize("dirty", [False, True])
def test_land_record_without_start_is_of_clean_tree(toy: ToyRepository, dirty: bool) -> None:
    if dirty:
        (toy.top / "file").write_text("changed\n")
    subprocess.run(["script/record-green"], cwd=toy.top, env=git_environment(), check=True)
    assert toy.proven() == (not dirty)


def test_land_record_of_dirty_start_is_refused(toy: ToyRepository) -> None:
    (toy.top / "untracked").touch()
    subprocess.run(["script/test"], cwd=toy.top, env=git_environment(), check=True)
    assert not (toy.top / ".cache/tested").exists()


def test_land_record_outside_git_is_skipped(toy: ToyRepository) -> None:
    shutil.rmtree(toy.top / ".git")
    subprocess.run(["script/test"], cwd=toy.top, env=git_environment(), check=True)
    assert not (toy.top / ".cache/tested").exists()
