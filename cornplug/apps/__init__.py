"""Description of a deployment in Python or TOML: its components, applications and routes.

    from cornplug.apps import Application, AppsFile, Component, Route

    file = AppsFile.read(Path("services.toml"))
    deployment = deployment_of(file)    # for `cornplug launch`
    file.to_toml()
    file.application("chat").client(routes=run_dir)    # an openai.OpenAI

`Component`, `Application` and `Route` are tables of the planner's input. `cornplug plan` can read the same
file if the file has a pool.
"""

from cornplug.apps.deployment import AppsFile, deployment_of
from cornplug.apps.deployment import RoutedApplication as Application
from cornplug.planner.inputs.components import Component, ComponentResources
from cornplug.planner.inputs.request_tables import RequestMedia, RequestSpec, Slo
from cornplug.planner.inputs.schema import AppNamespace, ClassOfService, LaunchOptions, Route

__all__ = [
    "AppNamespace",
    "Application",
    "AppsFile",
    "ClassOfService",
    "Component",
    "ComponentResources",
    "LaunchOptions",
    "RequestMedia",
    "RequestSpec",
    "Route",
    "Slo",
    "deployment_of",
]
