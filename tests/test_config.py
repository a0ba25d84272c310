"""Settings: precedence, errors that name the field, and a secret that is made once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from cornplug.config import Config, load
from cornplug.errors import ConfigError
from cornplug.private_paths import cache_dir, read_secret, runtime_dir, secret_problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cornplug.toml"
    path.write_text('[store]\nsize_bytes = 1000\nlease_s = 7\n[engine]\napp = "from-file"\n')
    return path


def test_defaults_need_nothing() -> None:
    assert load(environ={}) == Config()


def test_file_over_defaults(file: Path) -> None:
    config = load(environ={"CORNPLUG_CONFIG": str(file)})
    assert (config.store.size_bytes, config.store.lease_s, config.engine.app) == (1000, 7.0, "from-file")
    assert config.store.deadline_s == Config().store.deadline_s


def test_environment_over_file_and_overrides_over_both(file: Path) -> None:
    environ = {
        "CORNPLUG_CONFIG": str(file),
        "CORNPLUG_STORE_SIZE_BYTES": "2000",
        "CORNPLUG_ENGINE_APP": "from-env",
        "UNRELATED": "x",
    }
    config = load({"engine.app": "from-flag"}, environ=environ)
    assert (config.store.size_bytes, config.store.lease_s, config.engine.app) == (2000, 7.0, "from-flag")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("off", False)])
def test_switches_read_words(text: str, value: bool) -> None:
    assert load(environ={"CORNPLUG_ENGINE_SHARE_KV": text}).engine.share_kv is value


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"CORNPLUG_STORE_SIZE_BYTES": "many"}, "store.size_bytes"),
        ({"CORNPLUG_STORE_SIZE_BYTES": "-1"}, "store.size_bytes"),
        ({"CORNPLUG_STORE_NO_SUCH_FIELD": "1"}, "store.no_such_field"),
        ({"CORNPLUG_ENGINE_PAGE_TOKENS": "24"}, "engine.page_tokens"),
        ({"CORNPLUG_ENGINE_APP": "two words"}, "engine.app"),
        ({"CORNPLUG_ENCODER_PORT": "70000"}, "encoder.port"),
    ],
)
def test_a_wrong_value_names_its_field_and_the_way_to_set_it(environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert caught.value.field == field
    assert next(iter(environ)) in str(caught.value)


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothere.*Sections: store, encoder, engine"):
        load({"nothere.x": 1}, environ={})
    path = tmp_path / "c.toml"
    path.write_text("[nothere]\nx = 1\n")
    with pytest.raises(ConfigError, match="nothere"):
        load(environ={"CORNPLUG_CONFIG": str(path)})


def test_a_value_outside_any_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("store = 1\n")
    with pytest.raises(ConfigError, match="store"):
        load(environ={"CORNPLUG_CONFIG": str(path)})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(environ={"CORNPLUG_CONFIG": str(tmp_path / "absent.toml")})
    broken = tmp_path / "broken.toml"
    broken.write_text("[store\n")
    with pytest.raises(ConfigError, match="no TOML"):
        load(environ={"CORNPLUG_CONFIG": str(broken)})


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().store.size_bytes = 1  # type: ignore[misc]


def test_folders_follow_the_desktop_s_conventions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert runtime_dir() == tmp_path / "run" / "cornplug"
    assert cache_dir() == tmp_path / "cache" / "cornplug"
    assert Config().store.socket.parent == runtime_dir()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "cornplug"
    assert runtime_dir().is_absolute()


# --- the secret ---


def test_the_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = read_secret(path)
    assert len(first) == 32
    assert len(set(first)) > 8  # 32 random bytes: fewer values happen once in 10^30
    assert read_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_secret(tmp_path / "other") != first


def test_concurrent_first_threads_agree(tmp_path: Path) -> None:
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


def test_concurrent_first_processes_agree(tmp_path: Path) -> None:
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
def test_a_secret_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=f"{size} bytes"):
        read_secret(path)


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o604, 0o620, 0o601])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    read_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"store\.secret_file: .*mode .*chmod 600"):
        read_secret(path)


def test_a_secret_of_another_user_is_refused() -> None:
    about = os.stat_result((0o100600, 1, 1, 1, os.getuid() + 1, 0, 32, 0, 0, 0))
    assert secret_problem(about) == f"belongs to user {os.getuid() + 1}"


@pytest.mark.parametrize(("mode", "fits"), [(0o400, True), (0o440, True), (0o444, False), (0o460, False)])
def test_root_may_give_a_secret_to_a_group_of_ours(mode: int, fits: bool) -> None:
    """Kubernetes mounts it so for a pod with an fsGroup."""
    about = os.stat_result((0o100000 | mode, 1, 1, 1, 0, 1000, 32, 0, 0, 0))
    assert (secret_problem(about) == "") is fits


def test_a_secret_that_cannot_be_made_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"store\.secret_file: .*CORNPLUG_STORE_SECRET_FILE"):
        read_secret(tmp_path / "file" / "secret")


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir() == runtime_dir()
