"""Apps file: the planner's input with the resources of one host. The pool is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field

from cornplug.apps import launch_checks
from cornplug.apps.application import RoutedApplication
from cornplug.apps.toml_text import toml_text
from cornplug.errors import ConfigError
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.input_error import nearest
from cornplug.planner.inputs.json_schema import plan_schema
from cornplug.planner.inputs.schema import NodeClass, PlanInput


class AppsFile(PlanInput):
    """Input of `cornplug launch`."""

    pool: list[NodeClass] = Field(default_factory=list)
    """Machines that you can rent or own, for `cornplug plan`. A launch does not use them."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises ConfigError with the line of each error and its remedy."""
        return toml_reader.read_as(cls, path, launch_checks.errors)

    def check(self) -> Self:
        """Check a file that was created in Python, and return it. Raises ConfigError for its first
        contradiction."""
        for error in launch_checks.errors(self):
            raise error
        return self

    def application(self, name: str) -> RoutedApplication:
        """Return the application with this name, for its client. Raises ConfigError("application")."""
        for one in self.applications:
            if one.name == name:
                return RoutedApplication.model_validate(one.model_dump(exclude_unset=True))
        names = [one.name for one in self.applications]
        raise ConfigError("application", f"unknown application {name!r}", nearest(name, names))

    def to_toml(self) -> str:
        """Return the file as TOML that `read` accepts: values that were set, and paths unchanged."""
        return toml_text(self.model_dump(mode="json", exclude_unset=True, exclude_none=True))

    @classmethod
    def schema_of_file(cls) -> dict[str, Any]:
        """Return the JSON schema (draft 2020-12) of its TOML form."""
        return plan_schema(cls)
