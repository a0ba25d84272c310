"""Requests of a model with several cache groups, as one cache group tracks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from cornplug.errors import CornplugError
from cornplug.vllm_connector.kv.page_kinds import PageKind
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests


class GroupRequests:
    """The tracked requests, with separate save progress for one cache group. Cache groups differ in which
    pages are saved."""

    def __init__(self, requests: TrackedRequests, kind: PageKind) -> None:
        self._requests, self._kind = requests, kind
        self._tracked: dict[str, TrackedRequest] = {}
        self._completing: Sequence[tuple[TrackedRequest, int]] = ()

    @property
    def is_sharing(self) -> bool:
        """Whether KV computed with this engine's weights may be shared now."""
        return self._requests.is_sharing

    def has_unfinished(self) -> bool:
        """Return whether any tracked request is still unfinished."""
        return self._requests.has_unfinished()

    def find_state(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return the record of a request's pages in this cache group, or None if the group does not track the
        request."""
        found = self._tracked.get(tracked.request.request_id)
        return found if found is not None and found.request is tracked.request else None

    def state_of(self, tracked: TrackedRequest) -> TrackedRequest:
        """Return the record of a request's pages in this cache group, created on first use."""
        request = tracked.request
        found = self.find_state(tracked)
        if found is None:
            found = self._tracked[request.request_id] = TrackedRequest(request, own_tokens=tracked.own_tokens)
        if found.keys is None and tracked.keys is not None:
            # If the request's adapter has changed since it was tracked, no page of this group is saved.
            with suppress(CornplugError):
                found.keys = tracked.keys.with_root(self._requests.root_of(request, self._kind.geometry))
        return found

    def set_completing(self, ends: Sequence[tuple[TrackedRequest, int]]) -> None:
        """Set the requests that `find_completing` returns for this group in this step. `ends` is the result
        of `TrackedRequests.find_completing` for the step."""
        self._completing = ends

    def find_completing(
        self, scheduled_tokens: Mapping[str, int], total: int
    ) -> list[tuple[TrackedRequest, int]]:
        """Return the requests that may complete a page in this step, each with its number of computed tokens
        after the step. The arguments are ignored."""
        return [(self.state_of(tracked), end) for tracked, end in self._completing]

    def schedule_check(self, tracked: TrackedRequest) -> None:
        """Check the request for a completed page in the next step that schedules it."""
        self._requests.schedule_check(tracked)

    def forget(self, tracked: TrackedRequest) -> None:
        """Remove the record of a request's pages in this cache group."""
        if self.find_state(tracked) is not None:
            del self._tracked[tracked.request.request_id]
