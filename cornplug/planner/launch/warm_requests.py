"""Requests that put the applications' system prompts and prefixes into the store, for `cornplug warm`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cornplug.planner.plan import Plan, PlannedApplication


def warm_requests(plan: Plan, routes: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the URL of each application's first engine, and its prompts as JSON lines."""
    found = {}
    for app in plan.applications:
        urls = [way["to"][0]["url"] for name, way in routes.items() if name.partition("/")[0] == app.name]
        if lines := _lines(app):
            found[app.name] = (urls[0], "".join(f"{json.dumps(line)}\n" for line in lines))
    return found


def _lines(app: PlannedApplication) -> list[dict[str, Any]]:
    """Return one request for each prefix after the system prompt, or the system prompt alone without
    prefixes."""
    system = [{"role": "system", "content": app.system_prompt}] if app.system_prompt else []
    salt = {"cache_salt": app.tenant} if app.tenant else {}
    texts = app.prefixes or ([""] if system else [])
    return [{"messages": [*system, {"role": "user", "content": text}], **salt} for text in texts]
