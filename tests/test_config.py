"""Settings: precedence, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from pydantic import ValidationError

from cornplug.config import (
    EMBEDDINGS_BY_VALUE,
    IMAGES_PER_PROMPT,
    Config,
    EncoderConfig,
    EngineConfig,
    StoreConfig,
    dump_portable,
    load,
    load_portable,
)
from cornplug.errors import ConfigError

SIZED = {"store": StoreConfig, "encoder": EncoderConfig, "engine": EngineConfig}


def is_size(name: str) -> bool:
    return "bytes" in name.split("_")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cornplug.toml"
    path.write_text('[store]\nsize_bytes = 1000\ndeadline_s = 7\n[engine]\napp = "from-file"\n')
    return path


def test_load_without_anything_gives_defaults() -> None:
    assert load(environ={}) == Config()


def test_load_file_wins_over_defaults(file: Path) -> None:
    config = load(environ={"CORNPLUG_CONFIG": str(file)})
    assert (config.store.size_bytes, config.store.deadline_s, config.engine.app) == (1000, 7.0, "from-file")
    assert config.store.quarantine_s == Config().store.quarantine_s


def test_load_environment_over_file_overrides_over_both(file: Path) -> None:
    environ = {
        "CORNPLUG_CONFIG": str(file),
        "CORNPLUG_STORE_SIZE_BYTES": "2000",
        "CORNPLUG_ENGINE_APP": "from-env",
        "UNRELATED": "x",
    }
    config = load({"engine.app": "from-flag"}, environ=environ)
    assert (config.store.size_bytes, config.store.deadline_s, config.engine.app) == (2000, 7.0, "from-flag")


@pytest.mark.parametrize(
    "setting", [f"{s}.{name}" for s, kind in SIZED.items() for name in kind.model_fields if is_size(name)]
)
def test_load_every_size_takes_a_unit(setting: str) -> None:
    section, name = setting.split(".")
    for text, size_bytes in (("64GiB", 64 << 30), ("1.5 gb", 1_500_000_000), ("68719476736", 64 << 30)):
        assert getattr(getattr(load({setting: text}, environ={}), section), name) == size_bytes
    for wrong in ("64 gigs", "GiB", "0", "64GiB or so"):
        with pytest.raises(ConfigError, match=rf"{setting}.*(is not a size: write 64GiB|greater than)"):
            load({setting: wrong}, environ={})


def test_load_urls_of_far_stores_come_from_flag_variable_and_file(tmp_path: Path) -> None:
    urls = ("file:///share", "valkey://far:6379/0")
    assert load({"store.far": "file:///share, valkey://far:6379/0"}, environ={}).store.far == urls
    assert load(environ={"CORNPLUG_STORE_FAR": ",".join(urls)}).store.far == urls
    (tmp_path / "c.toml").write_text('[store]\nfar = ["file:///share", "valkey://far:6379/0"]\n')
    assert load(environ={"CORNPLUG_CONFIG": str(tmp_path / "c.toml")}).store.far == urls
    assert load(environ={"CORNPLUG_STORE_FAR": ""}).store.far == ()


def test_load_sealing_secrets_of_far_stores_are_absolute_paths() -> None:
    found = load(environ={"CORNPLUG_STORE_FAR_SECRET_FILES": "/etc/new, /etc/old"}).store
    assert found.far_secret_files == (Path("/etc/new"), Path("/etc/old"))
    with expect_error(ConfigError, field="store.far_secret_files", match="keys/old"):
        load(environ={"CORNPLUG_STORE_FAR_SECRET_FILES": "/etc/new,keys/old"})


def test_load_relative_paths_are_of_the_files_folder_and_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "c.toml").write_text('[store]\nsecret_file = "keys/secret"\naccess_log = "/log"\n')
    monkeypatch.chdir(tmp_path)
    environ = {"CORNPLUG_CONFIG": "conf/c.toml", "CORNPLUG_STORE_SOCKET": "s.sock"}
    config = load({"encoder.socket": Path("e.sock")}, environ=environ)
    assert config.store.secret_file == tmp_path / "conf" / "keys" / "secret"
    assert config.store.access_log == Path("/log")
    assert config.store.socket == tmp_path / "s.sock"
    assert config.encoder.socket == tmp_path / "e.sock"


def test_portable_settings_are_equal_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "c.toml").write_text(
        '[store]\nsecret_file = "secret"\nsize_bytes = "1GiB"\nfar = ["file:///a", "file:///b"]\n'
        '[store.namespaces.chat]\napps = ["chat", "agents"]\nttl_s = 60\n[encoder]\nadmin_key = "key"\n'
    )
    monkeypatch.chdir(tmp_path)
    here = load(environ={"CORNPLUG_CONFIG": "conf/c.toml", "CORNPLUG_STORE_ACCESS_LOG": "log"})
    handed = json.loads(json.dumps(dump_portable(here)))
    monkeypatch.chdir("/")
    monkeypatch.setenv("CORNPLUG_STORE_DISK_PATH", "/of/this/process")
    there = load_portable(handed)
    assert there.store == here.store
    assert there.engine == here.engine
    assert there.encoder == here.encoder.model_copy(update={"admin_key": EncoderConfig().admin_key})
    assert "key" not in handed.values()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("off", False)])
def test_load_switch_reads_words(text: str, value: bool) -> None:
    assert load(environ={"CORNPLUG_ENGINE_SHARE_KV": text}).engine.share_kv is value


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"CORNPLUG_STORE_SIZE_BYTES": "many"}, "store.size_bytes"),
        ({"CORNPLUG_STORE_SIZE_BYTES": "-1"}, "store.size_bytes"),
        ({"CORNPLUG_ENGINE_PAGE_TOKENS": "24"}, "engine.page_tokens"),
        ({"CORNPLUG_ENGINE_APP": "two words"}, "engine.app"),
        ({"CORNPLUG_ENCODER_PORT": "70000"}, "encoder.port"),
    ],
)
def test_load_wrong_value_names_field_and_variable(environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert caught.value.field == field
    assert next(iter(environ)) in str(caught.value)


def test_load_unknown_setting_is_to_be_removed() -> None:
    with expect_error(ConfigError, field="store.no_such_field") as caught:
        load(environ={"CORNPLUG_STORE_NO_SUCH_FIELD": "1"})
    assert "CORNPLUG_STORE_NO_SUCH_FIELD" in str(caught.value)


def test_load_unknown_section_is_named(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="nothere.x", match="nothere"):
        load({"nothere.x": 1}, environ={})
    path = tmp_path / "c.toml"
    path.write_text("[nothere]\nx = 1\n")
    with expect_error(ConfigError, field=f"{path}: [nothere]"):
        load(environ={"CORNPLUG_CONFIG": str(path)})


def test_load_value_outside_sections_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("store = 1\n")
    with expect_error(ConfigError, field=f"{path}: [store]"):
        load(environ={"CORNPLUG_CONFIG": str(path)})


def test_load_unreadable_file_is_named(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="CORNPLUG_CONFIG", match=r"absent\.toml"):
        load(environ={"CORNPLUG_CONFIG": str(tmp_path / "absent.toml")})
    broken = tmp_path / "broken.toml"
    broken.write_text("[store\n")
    with expect_error(ConfigError, field="CORNPLUG_CONFIG"):
        load(environ={"CORNPLUG_CONFIG": str(broken)})


def test_load_portable_leaves_engine_flags_out() -> None:
    here = load({"engine.app": "chat"}, environ={})
    flag = EMBEDDINGS_BY_VALUE
    assert load_portable({**dump_portable(here), flag: True}) == here
    assert load_portable({"engine.app": "chat", flag: True}).engine.app == "chat"
    with pytest.raises(ConfigError):
        load({flag: True}, environ={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (EMBEDDINGS_BY_VALUE, "yes"),
        (IMAGES_PER_PROMPT, True),
        (IMAGES_PER_PROMPT, "2"),
        ("engine_flag.other", 1),
    ],
)
def test_load_portable_wrong_engine_flag_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_portable({name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "setting",
    ["encoder.deadline_s", "encoder.language_only_timeout_s", "qos.classes"],
)
def test_load_deadline_above_the_services_limit_is_refused(setting: str) -> None:
    value: Any = {"batch": {"deadline_s": 121}} if setting == "qos.classes" else 121
    with pytest.raises(ConfigError, match="120") as caught:
        load({setting: value}, environ={})
    assert caught.value.field.startswith(setting)


def test_store_background_timeout_is_at_least_a_second() -> None:
    assert StoreConfig().background_timeout_s == 1.0
    assert StoreConfig(deadline_s=5).background_timeout_s == 5.0


def test_config_after_loading_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().store.size_bytes = 1  # type: ignore[misc]
