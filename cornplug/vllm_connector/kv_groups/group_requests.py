"""Tracked requests from the point of view of one cache group's saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cornplug.errors import CornplugError
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests
from cornplug.vllm_connector.kv_groups.page_kinds import PageKind

if TYPE_CHECKING:
    from vllm.v1.request import Request


class GroupRequests:
    """Requests of one cache group. Groups differ in which pages are saved."""

    def __init__(self, requests: TrackedRequests, kind: PageKind) -> None:
        self._requests, self._kind = requests, kind
        self._tracked: dict[str, TrackedRequest] = {}
        self._ends: Sequence[tuple[TrackedRequest, int]] = ()

    @property
    def sharing(self) -> bool:
        """Whether KV of this engine's weights may be shared now."""
        return self._requests.sharing

    def unfinished(self) -> bool:
        """Whether a tracked request has not finished."""
        return self._requests.unfinished()

    def get(self, request: Request) -> TrackedRequest | None:
        """A request's pages of this group, or None if this group has none."""
        found = self._tracked.get(request.request_id)
        return found if found is not None and found.request is request else None

    def of(self, tracked: TrackedRequest) -> TrackedRequest:
        """A request's pages of this group."""
        request = tracked.request
        found = self.get(request)
        if found is None:
            found = self._tracked[request.request_id] = TrackedRequest(request, own=tracked.own)
        if found.keys is None and tracked.keys is not None:
            # If the adapter changed in between, nothing of this group is saved.
            with suppress(CornplugError):
                found.keys = tracked.keys.under(self._requests.root_of(request, self._kind.geometry))
        return found

    def completed(self, ends: Sequence[tuple[TrackedRequest, int]]) -> None:
        """Set the result of `TrackedRequests.completing` for this step."""
        self._ends = ends

    def completing(self, scheduled_tokens: Mapping[str, int], total: int) -> list[tuple[TrackedRequest, int]]:
        """Requests that may complete a page in this step, each with its computed tokens after the step."""
        return [(self.of(tracked), end) for tracked, end in self._ends]

    def look_at(self, tracked: TrackedRequest) -> None:
        """Check the request in the next step that computes its tokens, because it may complete a page."""
        self._requests.look_at(tracked)

    def forget(self, request: Request) -> None:
        """Forget a request's pages of this group."""
        if self.get(request) is not None:
            del self._tracked[request.request_id]
