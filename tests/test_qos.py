"""Classes of service: who is of which, what a key opens, and what a wrong file is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from expected_errors import expect_error
from hypothesis import given
from hypothesis import strategies as st

from cornplug.config import QosConfig, load
from cornplug.errors import ConfigError
from cornplug.qos import MIN_SHARE, QosClasses

DIGEST = "sha256:" + hashlib.sha256(b"gold-key").hexdigest()
FILE = f"""
[qos]
default = "standard"

[qos.classes.premium]
share = 0.5
priority = 10
deadline_s = 2
api_keys = ["{DIGEST}", "other-key"]
apps = ["checkout"]

[qos.classes.standard]
share = 0.3

[qos.classes.nightly]
priority = -1
apps = ["reports"]
"""


def read(tmp_path: Path, text: str) -> QosConfig:
    path = tmp_path / "cornplug.toml"
    path.write_text(text)
    return load(environ={"CORNPLUG_CONFIG": str(path)}).qos


@pytest.fixture
def classes(tmp_path: Path) -> QosClasses:
    return QosClasses(read(tmp_path, FILE))


@pytest.mark.parametrize(
    ("headers", "name", "app"),
    [
        ({}, "standard", None),
        ({"authorization": "Bearer gold-key"}, "premium", None),
        ({"authorization": "bearer other-key"}, "premium", None),
        ({"authorization": "Bearer gold-key", "x-cornplug-app": "checkout"}, "premium", "checkout"),
        ({"authorization": "Bearer gold-key", "x-cornplug-class": "nightly"}, "nightly", None),
        ({"authorization": "Bearer gold-keyx"}, "standard", None),
        ({"authorization": f"Bearer {DIGEST}"}, "standard", None),
        ({"authorization": "Basic gold-key"}, "standard", None),
        ({"x-cornplug-class": "nightly"}, "nightly", None),
        ({"x-cornplug-class": "premium"}, "standard", None),
        ({"x-cornplug-class": "no-such"}, "standard", None),
        ({"x-cornplug-app": "reports"}, "nightly", "reports"),
        ({"x-cornplug-app": "checkout"}, "standard", None),
        ({"x-cornplug-app": "<b>"}, "standard", None),
    ],
)
def test_headers_name_a_class_and_only_a_key_opens_one_with_keys(
    classes: QosClasses, headers: dict[str, str], name: str, app: str | None
) -> None:
    caller = classes.identify_caller(headers)
    assert (caller.qos.name, caller.app) == (name, app)


def test_engines_of_the_host_are_believed(classes: QosClasses) -> None:
    assert [classes.class_of_app(app).name for app in ("checkout", "reports", "else")] == [
        "premium",
        "nightly",
        "standard",
    ]
    assert classes.class_of_app("checkout").deadline_s == 2
    assert [c.name for c in classes.ranked_classes()] == ["premium", "standard", "nightly"]


def test_qos_classes_without_section_are_one_with_everything() -> None:
    (only,) = QosClasses.single().ranked_classes()
    assert (only.name, only.share, only.deadline_s) == ("default", 1.0, None)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_qos_classes_every_one_has_a_share_and_all_fit(shares: list[float]) -> None:
    total = max(1.0, sum(shares))
    config = QosConfig.model_validate(
        {"classes": {f"c{i}": {"share": one / total * 0.999} for i, one in enumerate(shares)}}
    )
    made = QosClasses(config).ranked_classes()
    assert sum(c.share for c in made) <= 1 + 1e-9
    assert min(c.share for c in made) > MIN_SHARE / 2


def test_qos_config_no_key_is_kept_or_printed(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    assert "other-key" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, '[qos.classes.a]\napi_key = "s3cret"\n')
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, '[qos.classes.a]\napi_keys = ["sha256:s3cret"]\nshare = 0.1\n')
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("[qos.classes.a]\nshare = 0.7\n[qos.classes.b]\nshare = 0.4\n", "qos", "1.1"),
        ("[qos.classes.a]\nshare = 1.5\n", "qos.classes.a.share", "1.5"),
        ('[qos]\ndefault = "x"\n', "qos", r"\[qos.classes.x\]"),
        ('[qos]\ndefault = "a"\n[qos.classes.a]\napi_keys = ["k"]\n', "qos", "default class"),
        ('[qos.classes.a]\napps = ["x"]\n[qos.classes.b]\napps = ["x"]\n', "qos", "apps: "),
        (
            '[qos.classes.a]\napi_keys = ["k"]\n[qos.classes.b]\napi_keys = ["k"]\n',
            "qos",
            "api_keys: ",
        ),
        ('[qos.classes.a]\napi_keys = [""]\n', "qos.classes.a.api_keys", ""),
        ('[qos.classes."two words"]\nshare = 0.1\n', "qos.classes.two words.[key]", ""),
    ],
)
def test_qos_config_contradiction_is_named(tmp_path: Path, text: str, field: str, value: str) -> None:
    with expect_error(ConfigError, field=field, match=value):
        read(tmp_path, text)
