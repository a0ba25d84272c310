"""docs/configuration.md, from cornplug/config.py and cornplug/settings.py."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from pathlib import Path
from typing import Any, Final
from unittest import mock

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from cornplug import config
from cornplug.encoder_service import server_flags as encoder_flags
from cornplug.engine_common.shared_flags import SETTINGS
from cornplug.store.daemon.main import store_parser

from .markdown import notice, table

_UNITS: Final = {
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_pixels": "pixels",
    "_threads": "threads",
    "share": "fraction",
    "ceiling": "fraction",
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
_NAMED: Final[tuple[tuple[type[BaseModel], str], ...]] = (
    (config.NamespaceConfig, "store.namespaces.NAME"),
    (config.ClassConfig, "qos.classes.NAME"),
)
"""Tables of a section, one for each name that an operator chooses."""
_HEAD: Final = ("setting, environment variable", "type", "default", "unit", "flag", "meaning")
_INTRO: Final = """# Configuration

This page lists every setting of cornplug.

{notice}

You can set a value in four places. The first one that is present wins:

1. A flag of the engine or command, shown in the *flag* column. Engine flags begin with `--cornplug-`.
2. An environment variable, `CORNPLUG_<SECTION>_<SETTING>`.
3. The TOML file named by `CORNPLUG_CONFIG`, with one table per section below.
4. The default.

An invalid value stops the command. The error names the setting, the value and the remedy.

- Sizes may have a unit: `64GiB` or `1.5GB`.
- Lists in environment variables are separated by commas.
- Relative paths in the TOML file are relative to that file. Elsewhere they are relative to the working
  directory.
- All worker processes of an engine, Ray workers included, use the settings of its main process. So does a
  store that the engine starts.

Sockets are created in `/tmp/cornplug-UID`, where UID is the user's id. To use another directory, set
`CORNPLUG_RUNTIME_DIR` for all processes that share.
"""


def page() -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRO.format(notice=notice("`cornplug/config.py` and `cornplug/settings.py`"))]
    for section, field in config.Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(model)}\n\n{_table(model, section)}\n")
    for model, section in _NAMED:
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(model)}\n\n{_table(model, section)}\n")
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


def _table(model: type[BaseModel], section: str) -> str:
    said = descriptions(model)
    rows = []
    for name, field in model.model_fields.items():
        dotted = f"{section}.{name}"
        by_environment = "NAME" not in section and name not in ("classes", "namespaces")
        variable = f"<br>`CORNPLUG_{dotted.replace('.', '_').upper()}`" if by_environment else ""
        rows.append(
            (
                f"`{name}`{variable}",
                _type(field),
                _default(field),
                _unit(name),
                "<br>".join(f"`{flag}`" for flag in flags(dotted)),
                said[name],
            )
        )
    return table(_HEAD, rows)


def flags(dotted: str) -> list[str]:
    """The flags that set one setting, with the command of those that are no engine's."""
    found = [flag for flag, (setting, _) in SETTINGS.items() if setting == dotted]
    found += [f"encoder {flag}" for flag, setting in _of_encoder().items() if setting == dotted]
    if dotted in _STORE_FLAGS:
        found.append(f"serve-store {_STORE_FLAGS[dotted]}")
    return found


def _of_encoder() -> dict[str, str]:
    """Flag of `cornplug encoder` -> setting: `overrides` is asked with each flag's own name for a value."""
    parser = encoder_flags.parser("")
    names = {a.dest: a.option_strings[0] for a in parser._actions if a.option_strings}
    return {
        str(flag): setting for setting, flag in encoder_flags.overrides(argparse.Namespace(**names)).items()
    }


def store_flags() -> set[str]:
    """Every flag of `cornplug serve-store`."""
    return {flag for a in store_parser(config.StoreConfig())._actions for flag in a.option_strings}


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    text = (
        annotation.__name__
        if isinstance(annotation, type) and not hasattr(annotation, "__args__")
        else str(annotation)
    )
    for long, short in (
        ("pathlib.", ""),
        ("typing.", ""),
        ("cornplug.config.", ""),
        ("cornplug.settings.", ""),
        ("NoneType", "None"),
    ):
        text = text.replace(long, short)
    # Optional[Annotated[int, ...]], as a size has it.
    inner = [one for one in getattr(annotation, "__args__", ()) if hasattr(one, "__metadata__")]
    if type(None) in getattr(annotation, "__args__", ()) and inner:
        text = f"{inner[0].__origin__.__name__} | None"
    if text.startswith("tuple["):
        return "list of text"
    names = {"Path": "path", "SecretStr": "text", "str": "text"}
    if text.startswith("dict["):
        return "table"
    if text.startswith("Literal["):
        return " or ".join(f'"{one}"' for one in annotation.__args__)
    return names.get(text, text)


def _default(field: FieldInfo) -> str:
    if field.default_factory is None:
        value = field.default
    else:
        places = {"CORNPLUG_RUNTIME_DIR": "/tmp/cornplug-UID", "XDG_CACHE_HOME": "$XDG_CACHE_HOME"}
        with mock.patch.dict(os.environ, places):
            value = field.default_factory()  # type: ignore[call-arg]
        if not isinstance(value, (Path, dict)):
            return "computed"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, tuple):
        value = ", ".join(value)
    return f"`{value:,}`".replace(",", "_") if isinstance(value, int) and value > 9999 else f"`{value}`"


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
