"""script/test-anywhere in a toy repository whose set-up and tests are stubs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
# Shows where and as whom it runs; fails in folders named "of cornplug" if told so.
SETUP = r"""#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
shm=$(df -k --output=size /dev/shm | tail -n 1 | tr -d ' ')
echo "set-up in $PWD as $(id -u), shm $shm, PYTHON ${PYTHON:-}"
[[ $PWD != */"of cornplug" || ! -e fail ]]
mkdir -p .venv/bin
printf '#!/usr/bin/env bash\necho "tests: $*"\n' >.venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "script").mkdir()
    shutil.copy(TREE / "script/test-anywhere", tmp_path / "script")
    (tmp_path / "script/setup").write_text(SETUP)
    (tmp_path / "script/setup").chmod(0o755)
    (tmp_path / ".gitignore").write_text(".venv*\n")
    return tmp_path


def commit(toy: Path) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    for words in (("init", "--quiet"), ("add", "-A"), ("commit", "--quiet", "-m", "all")):
        subprocess.run(["git", *identity, *words], cwd=toy, check=True)


def anywhere(toy: Path, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        ["script/test-anywhere", *words],
        cwd=toy,
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        start_new_session=True,
    )
    return done.returncode, done.stdout.splitlines()


def test_anywhere_each_place_is_set_up_and_tested(toy: Path) -> None:
    commit(toy)
    status, lines = anywhere(toy, "--no-engine")
    assert status == 0, lines
    results = dict(line.split(": ", 1) for line in lines[-5:])
    assert list(results) == ["clone", "small-shm", "space", "user", "python3.12"]
    assert all(result.startswith(("ok", "skipped, ")) for result in results.values())
    ok = [place for place, result in results.items() if result.startswith("ok")]
    assert {"clone", "space"} <= set(ok)
    starts = dict(zip(ok, (line for line in lines if line.startswith("set-up in ")), strict=True))
    assert "/a folder/of cornplug as" in starts["space"]
    if "small-shm" in ok:
        assert ", shm 65536," in starts["small-shm"]
    if "user" in ok:
        assert " as 65534, " in starts["user"]
    assert len([line for line in lines if line.startswith("tests: -m pytest")]) == len(ok)


def test_anywhere_failed_place_fails_the_run_at_its_end(toy: Path) -> None:
    (toy / "fail").touch()
    commit(toy)
    status, lines = anywhere(toy, "space", "clone")
    assert status == 1
    assert [line.rpartition(",")[0] for line in lines[-2:]] == ["space: FAILED", "clone: ok"]
    assert len([line for line in lines if line.startswith("tests: -m pytest")]) == 2


def test_anywhere_outside_git_is_skipped(toy: Path) -> None:
    status, lines = anywhere(toy)
    assert status == 0
    assert "no git checkout" in lines[-1]


def test_anywhere_unknown_place_is_refused(toy: Path) -> None:
    assert anywhere(toy, "moon") == (2, ["test-anywhere: there is no place moon"])
