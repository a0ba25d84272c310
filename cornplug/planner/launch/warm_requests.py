"""Creates the requests with which `cornplug warm` puts system prompts and prefixes of applications into the
store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cornplug.planner.plan import Plan, PlannedApplication


def warm_requests(plan: Plan, routes: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return (URL of the first engine, prompts as JSON lines) for each application with prompts."""
    found = {}
    for app in plan.applications:
        urls = [way["to"][0]["url"] for name, way in routes.items() if name.partition("/")[0] == app.name]
        if lines := _lines(app):
            found[app.name] = (urls[0], "".join(f"{json.dumps(line)}\n" for line in lines))
    return found


def _lines(app: PlannedApplication) -> list[dict[str, Any]]:
    """Return the requests for one application.

    There is one request for each prefix, after the system prompt. Without prefixes, there is one request with
    only the system prompt.
    """
    system = [{"role": "system", "content": app.system_prompt}] if app.system_prompt else []
    salt = {"cache_salt": app.tenant} if app.tenant else {}
    texts = app.prefixes or ([""] if system else [])
    return [{"messages": [*system, {"role": "user", "content": text}], **salt} for text in texts]
