"""Creates the settings files of a plan's processes (CORNPLUG_CONFIG), with classes of service and
namespaces."""

from __future__ import annotations

import json
import math

from cornplug.planner.plan import Plan


def qos_toml(plan: Plan) -> str:
    """Return a settings file with the classes of service, for the encoder service and for admission
    control."""
    lines = [f"# Classes of service of the plan {plan.name!r}."]
    for one in plan.reservations:
        lines += ["", f"[qos.classes.{json.dumps(one.qos)}]", f"share = {_down(one.share)}"]
        lines += [f"priority = {one.priority}"]
        lines += [] if one.deadline_s is None else [f"deadline_s = {one.deadline_s:.4g}"]
        lines += [f"apps = {json.dumps(one.apps)}"] if one.apps else []
    return "\n".join(lines) + "\n"


def store_toml(plan: Plan) -> str:
    """Return a settings file with the store's namespaces, one for each application with a namespace."""
    lines = ["# Namespaces of a plan's applications."]
    for app in plan.applications:
        if app.namespace is not None:
            lines += ["", f"[store.namespaces.{json.dumps(app.name)}]"]
            values = app.namespace.model_dump(exclude_none=True)
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def has_namespaces(plan: Plan) -> bool:
    return any(app.namespace is not None for app in plan.applications)


def _down(share: float) -> float:
    """Round a share down to four digits, because the sum of all classes' shares must not exceed 1."""
    return math.floor(share * 1e4) / 1e4
