"""This user's folders, and a secret that is made once and read by its owner only."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.config import Config, load
from cornplug.errors import ConfigError
from cornplug.private_paths import cache_dir, read_secret, runtime_dir, secret_problem


def test_cache_dir_follows_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache" / "cornplug"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "cornplug"


@pytest.mark.parametrize("session", ["login", "service", "compute node"])
def test_sockets_are_in_one_folder_in_every_session(
    session: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A login has XDG_RUNTIME_DIR, a service and cron have not, and Slurm copies it to hosts without it."""
    monkeypatch.delenv("CORNPLUG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if session != "service":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("absent" if session == "compute node" else "")))
    config = load()
    folder = Path(f"/tmp/cornplug-{os.getuid()}")
    assert config.store.socket.parent == config.encoder.socket.parent == runtime_dir() == folder


def test_runtime_dir_named_by_the_operator_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for named in (str(tmp_path / "run"), "run"):
        monkeypatch.setenv("CORNPLUG_RUNTIME_DIR", named)
        assert Config().store.socket.parent == Config().encoder.socket.parent == tmp_path / "run"


def test_read_secret_first_use_makes_it_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = read_secret(path)
    assert len(first) == 32
    assert len(set(first)) > 8  # 32 random bytes: fewer values happen once in 10^30
    assert read_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_secret(tmp_path / "other") != first


def test_read_secret_concurrent_first_threads_agree(tmp_path: Path) -> None:
    path, found, start = tmp_path / "secret", [], threading.Barrier(16)

    def first_use() -> None:
        start.wait()
        found.append(read_secret(path))

    threads = [threading.Thread(target=first_use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_read_secret_concurrent_first_processes_agree(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from cornplug.private_paths import read_secret; "
        "sys.stdin.readline(); print(read_secret(pathlib.Path(sys.argv[1])).hex())"
    )
    pipe = subprocess.PIPE
    root = Path(__file__).parents[1]
    users = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "secret")],
            stdin=pipe,
            stdout=pipe,
            text=True,
            cwd=root,
        )
        for _ in range(4)
    ]
    for user in users:  # all have been started before any may go
        assert user.stdin is not None
        user.stdin.write("\n")
        user.stdin.flush()
    found = {user.communicate(timeout=60)[0] for user in users}
    assert all(user.returncode == 0 for user in users)
    assert len(found) == 1
    assert len(bytes.fromhex(found.pop())) == 32


@pytest.mark.parametrize("size", [0, 31, 33])
def test_read_secret_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(size))
    with expect_error(ConfigError, field="store.secret_file", match=f"{size} bytes"):
        read_secret(path)


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o604, 0o620, 0o601])
def test_read_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    read_secret(path)
    path.chmod(mode)
    with expect_error(ConfigError, field="store.secret_file", match="chmod 600"):
        read_secret(path)


def test_secret_problem_file_of_another_user_is_named() -> None:
    about = os.stat_result((0o100600, 1, 1, 1, os.getuid() + 1, 0, 32, 0, 0, 0))
    assert secret_problem(about) == f"belongs to user {os.getuid() + 1}"


@pytest.mark.parametrize(("mode", "fits"), [(0o400, True), (0o440, True), (0o444, False), (0o460, False)])
def test_secret_problem_roots_file_for_our_group_fits(mode: int, fits: bool) -> None:
    """Kubernetes mounts it so for a pod with an fsGroup."""
    about = os.stat_result((0o100000 | mode, 1, 1, 1, 0, 1000, 32, 0, 0, 0))
    assert (secret_problem(about) == "") is fits


def test_read_secret_that_cannot_be_made_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with expect_error(ConfigError, field="store.secret_file", match="CORNPLUG_STORE_SECRET_FILE"):
        read_secret(tmp_path / "file" / "secret")


def test_cache_dir_user_without_home_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir() == runtime_dir()
