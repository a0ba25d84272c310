"""Routes of a request class: `routes.json` and its changes, addresses, and the words about wrong ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.apps.routed_call import RoutesFile, resolve_routes
from cornplug.errors import ConfigError

TABLE: dict[str, Any] = {
    "chat/text": {
        "priority": -2,
        "cache_salt": "acme",
        "to": [{"weight": 0.75, "url": "http://a:8000"}, {"weight": 0.25, "url": "http://b:8000"}],
    }
}


def written(folder: Path, table: Any = TABLE, name: str = "routes.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "new").write_text(json.dumps(table))
    os.replace(folder / "new", path)
    return path


def test_routes_of_a_launch_s_file_have_weights_priority_and_salt(tmp_path: Path) -> None:
    route = resolve_routes("chat", ["text"], written(tmp_path), None)()
    assert route.engines == {"http://a:8000": 0.75, "http://b:8000": 0.25}
    assert (route.priority, route.cache_salt) == (-2, "acme")


def test_routes_of_a_run_folder_are_those_of_its_file(tmp_path: Path) -> None:
    assert (
        resolve_routes("chat", ["text"], written(tmp_path).parent, None)()
        == resolve_routes("chat", ["text"], tmp_path / "routes.json", "text")()
    )


def test_routes_of_addresses_have_no_fields() -> None:
    route = resolve_routes("chat", ["text"], ["http://a:8000/", "http://b:8000"], None)()
    assert route.engines == {"http://a:8000": 1.0, "http://b:8000": 1.0}
    assert (route.priority, route.cache_salt) == (None, None)


def test_routes_of_the_only_launch_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORNPLUG_RUNTIME_DIR", str(tmp_path))
    with expect_error(ConfigError, field="routes", match="'chat/text'"):
        resolve_routes("chat", ["text"], None, None)
    written(tmp_path, TABLE, "plan-one/routes.json")
    written(tmp_path, {"other/text": TABLE["chat/text"]}, "plan-two/routes.json")
    assert "http://a:8000" in resolve_routes("chat", ["text"], None, None)().engines
    written(tmp_path, TABLE, "plan-three/routes.json")
    with expect_error(ConfigError, field="routes", match="plan-one"):
        resolve_routes("chat", ["text"], None, None)


def test_routes_of_an_application_with_two_classes_need_one_s_name() -> None:
    with expect_error(ConfigError, field="request"):
        resolve_routes("chat", ["text", "picture"], ["http://a"], None)
    with expect_error(ConfigError, field="request", match="'pictures'.*picture"):
        resolve_routes("chat", ["text", "picture"], ["http://a"], "pictures")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "routes: no service is set"),
        (["ftp://a"], "routes: 'ftp://a' is not an http URL"),
        ({"http://a": 0.0}, "routes: http://a has the invalid weight 0.0"),
    ],
)
def test_routes_of_wrong_addresses_name_the_remedy(source: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_routes("chat", ["text"], source, None)
    assert words in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"chat/x": {}}, "has no class 'chat/text'"),
        ({"chat/text": {}}, "has no addresses"),
        ([1], "cannot be"),
    ],
)
def test_routes_file_without_the_class_is_refused(tmp_path: Path, table: Any, words: str) -> None:
    with expect_error(ConfigError, field="routes", match=words):
        RoutesFile(written(tmp_path, table), "chat/text")


def test_routes_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    routes = RoutesFile(written(tmp_path), "chat/text")
    written(tmp_path, {"chat/text": {"to": [{"weight": 1.0, "url": "http://c:8000"}]}})
    assert routes.current().engines == {"http://c:8000": 1.0}
    (tmp_path / "routes.json").write_text("half of {")
    assert routes.current().engines == {"http://c:8000": 1.0}
    (tmp_path / "routes.json").unlink()
    assert routes.current().engines == {"http://c:8000": 1.0}
    written(tmp_path)
    assert "http://a:8000" in routes.current().engines
