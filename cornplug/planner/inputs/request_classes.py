"""Request classes: an application's requests of one kind, in one record. Each is a demand of the pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cornplug.planner.inputs.schema import Application, RequestSpec, Slo


@dataclass(frozen=True)
class RequestClass:
    app: Application
    request: RequestSpec

    @property
    def name(self) -> str:
        """The demand's: "application/request"."""
        return f"{self.app.name}/{self.request.name}"

    @property
    def slo(self) -> Slo:
        return self.request.slo or self.app.slo

    @property
    def rate(self) -> float:
        """Requests a second that are planned for."""
        return self.request.rate * self.request.peak

    @property
    def online(self) -> bool:
        return self.app.workload == "online"


def request_classes(applications: Iterable[Application]) -> dict[str, RequestClass]:
    """All request classes by name, in the order of the applications."""
    classes = [RequestClass(app, request) for app in applications for request in app.requests]
    return {c.name: c for c in classes}
