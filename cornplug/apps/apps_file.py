"""An apps file: the planner's input with the host's resources, and without need of a pool."""

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
    """Machines that can be had, for `cornplug plan`; a launch does without."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file's contents. Raises ConfigError with the line of each error and its remedy."""
        return toml_reader.read_as(cls, path, launch_checks.errors)

    def check(self) -> Self:
        """Itself, for one that was made in Python. Raises ConfigError for its first contradiction."""
        for error in launch_checks.errors(self):
            raise error
        return self

    def application(self, name: str) -> RoutedApplication:
        """The application of this name, for its client. Raises ConfigError("application")."""
        for one in self.applications:
            if one.name == name:
                return RoutedApplication.model_validate(one.model_dump(exclude_unset=True))
        names = [one.name for one in self.applications]
        raise ConfigError("application", f"there is no {name!r}", nearest(name, names))

    def to_toml(self) -> str:
        """The file that `read` takes: values that were set, paths as they are."""
        return toml_text(self.model_dump(mode="json", exclude_unset=True, exclude_none=True))

    @classmethod
    def schema_of_file(cls) -> dict[str, Any]:
        """The JSON schema (draft 2020-12) of its TOML form."""
        return plan_schema(cls)
