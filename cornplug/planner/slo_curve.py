"""What the SLO costs: the same input with every bound tighter or looser, planned again."""

from __future__ import annotations

from typing import Final

from cornplug.planner.inputs import Application, PlanInput, Slo

FACTORS: Final = (0.7, 1.5, 0.5, 2.0, 3.0)
"""Of every bound, in the order of interest; 1 is the plan itself."""


def scaled(given: PlanInput, factor: float, app: str | None = None) -> PlanInput:
    """Every bound times `factor`, of one application or of all; planned without simulation."""
    apps = [_app(a, factor) if app in (None, a.name) else a for a in given.applications]
    rules = given.rules.model_copy(update={"simulate": False})
    return given.model_copy(update={"applications": apps, "rules": rules})


def bounded(given: PlanInput) -> bool:
    """Is there any bound to scale?"""
    slos = [slo for a in given.applications for slo in (a.slo, *(r.slo for r in a.requests if r.slo))]
    return any(b is not None for slo in slos for b in (slo.ttft_s, slo.tpot_s, slo.e2e_s))


def _app(app: Application, factor: float) -> Application:
    requests = [r.model_copy(update={"slo": _slo(r.slo, factor)}) if r.slo else r for r in app.requests]
    return app.model_copy(update={"slo": _slo(app.slo, factor), "requests": requests})


def _slo(slo: Slo, factor: float) -> Slo:
    bounds = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}
    return slo.model_copy(update={k: v * factor for k, v in bounds.items() if v is not None})
