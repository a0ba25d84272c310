"""docs/configuration.md, from cornplug/config.py and cornplug/settings.py."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from pathlib import Path
from typing import Final
from unittest import mock

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from cornplug import config
from cornplug.encoder_service import server_flags as encoder_flags
from cornplug.engine_common.shared_flags import SHARED_FLAGS
from cornplug.store.daemon.main import store_parser

from .markdown import notice

_UNITS: Final = {
    "_bytes_s": "bytes/s",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_pixels": "pixels",
    "_threads": "threads",
}
# `cornplug serve-store` names its flags after the settings whose defaults they take.
_STORE_FLAGS: Final = {
    "store.socket": "--socket",
    "store.size_bytes": "--size",
    "store.secret_file": "--secret-file",
    "store.quarantine_s": "--quarantine-s",
    "store.metrics": "--metrics",
    "store.disk_path": "--disk",
    "store.disk_size_bytes": "--disk-size",
    "store.far": "--far",
}
_TABLES: Final = frozenset({"store.namespaces", "qos.classes"})
"""Settings whose tables have sections of their own."""
_NAMED: Final[tuple[tuple[type[BaseModel], str], ...]] = (
    (config.NamespaceConfig, "store.namespaces.NAME"),
    (config.ClassConfig, "qos.classes.NAME"),
)
"""Tables of a section, one for each name that an operator chooses."""
_INTRO: Final = """# Configuration

This page lists every setting of cornplug, with its default and flags.

{notice}

A value comes from the first of these places that has it: a flag, the environment variable
(`CORNPLUG_STORE_SIZE_BYTES` for `size_bytes` in `[store]`), the TOML file named by `CORNPLUG_CONFIG`, the
default. Flags that begin with `--cornplug-` are flags of the engines. Other processes of an engine, and a
store that it starts, use the settings of its main process.

- Sizes may have a unit: `64GiB` or `1.5GB`.
- Lists in environment variables and flags are separated by commas.
- Relative paths in the TOML file are relative to that file.
- Sockets are created in `/tmp/cornplug-UID`, where UID is the user's id. To use another directory, set
  `CORNPLUG_RUNTIME_DIR` for all processes that share.
"""
_EXAMPLE: Final = (
    "Only the TOML file can set it ([example](deploy-one-host.md#divide-resources-between-applications))."
)


def page() -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRO.format(notice=notice("`cornplug/config.py` and `cornplug/settings.py`"))]
    for section, field in config.Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(model)}\n\n{_list(model, section)}\n")
    for model, section in _NAMED:
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(model)} {_EXAMPLE}\n\n{_list(model, section)}\n")
    return "\n".join(parts)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Setting -> the docstring under it; "" where there is none."""
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    found = dict.fromkeys(model.model_fields, "")
    for one, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[one.target.id] = str(following.value.value).strip() if is_text else ""  # type: ignore[attr-defined]
    return found


def _list(model: type[BaseModel], section: str) -> str:
    """Each setting with its default, flags and meaning."""
    said = descriptions(model)
    lines = []
    for name, field in model.model_fields.items():
        dotted = f"{section}.{name}"
        if dotted in _TABLES:
            continue
        aliases = ", ".join(f"`{flag}`" for flag in flags(dotted))
        head = f"- **`{name}`**, {_default(field, _unit(name))}" + (f" ({aliases})" if aliases else "")
        lines.append(f"{head}: {' '.join(said[name].split())}")
    return "\n".join(lines)


def flags(dotted: str) -> list[str]:
    """The flags that set one setting, with the command of those that are no engine's."""
    found = [flag for flag, (setting, _) in SHARED_FLAGS.items() if setting == dotted]
    found += [f"encoder {flag}" for flag, setting in _of_encoder().items() if setting == dotted]
    if dotted in _STORE_FLAGS:
        found.append(f"serve-store {_STORE_FLAGS[dotted]}")
    return found


def _of_encoder() -> dict[str, str]:
    """Flag of `cornplug encoder` -> setting: `overrides` is asked with each flag's own name for a value."""
    parser = encoder_flags.build_parser("")
    names = {a.dest: a.option_strings[0] for a in parser._actions if a.option_strings}
    return {
        str(flag): setting
        for setting, flag in encoder_flags.setting_overrides(argparse.Namespace(**names)).items()
    }


def store_flags() -> set[str]:
    """Every flag of `cornplug serve-store`."""
    return {flag for a in store_parser(config.StoreConfig())._actions for flag in a.option_strings}


def _default(field: FieldInfo, unit: str) -> str:
    """The default with its unit, or what the value is if it has none."""
    if field.default_factory is None:
        value = field.default
    else:
        places = {"CORNPLUG_RUNTIME_DIR": "/tmp/cornplug-UID", "XDG_CACHE_HOME": "$XDG_CACHE_HOME"}
        with mock.patch.dict(os.environ, places):
            value = field.default_factory()  # type: ignore[call-arg]
        if not isinstance(value, (Path, dict)):
            return f"computed ({unit})" if unit else "computed"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ("", (), {}):
        return "empty"
    if value is None:
        return f"None ({unit})" if unit else "None"
    if isinstance(value, tuple):
        value = ", ".join(value)
    text = f"`{value:,}`".replace(",", "_") if isinstance(value, int) and value > 9999 else f"`{value}`"
    return f"{text} {unit}".strip()


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
