"""Settings of a plan's processes, in the form that CORNPLUG_CONFIG takes: classes of service, namespaces."""

from __future__ import annotations

import json
import math

from cornplug.planner.plan import Plan


def qos_toml(plan: Plan) -> str:
    """Classes of service of the encoder and of admission, as CORNPLUG_CONFIG takes them."""
    lines = [f"# Of the plan {plan.name!r}."]
    for one in plan.reservations:
        lines += ["", f"[qos.classes.{json.dumps(one.qos)}]", f"share = {_down(one.share)}"]
        lines += [f"priority = {one.priority}"]
        lines += [] if one.deadline_s is None else [f"deadline_s = {one.deadline_s:.4g}"]
        lines += [f"apps = {json.dumps(one.apps)}"] if one.apps else []
    return "\n".join(lines) + "\n"


def store_toml(plan: Plan) -> str:
    """Namespaces of the store, one for each application that has one."""
    lines = ["# Namespaces of a plan's applications."]
    for app in plan.applications:
        if app.namespace is not None:
            lines += ["", f"[store.namespaces.{json.dumps(app.name)}]"]
            values = app.namespace.model_dump(exclude_none=True)
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def has_namespaces(plan: Plan) -> bool:
    """Whether an application has a namespace of its own."""
    return any(app.namespace is not None for app in plan.applications)


def _down(share: float) -> float:
    """To four digits: the shares of all classes may not add up to over 1."""
    return math.floor(share * 1e4) / 1e4
