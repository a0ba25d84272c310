"""The requests that the KV scheduler follows, as the saves of one cache group see them."""

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
    """One per cache group. Which pages of a group are saved, and which are not, differs by group."""

    def __init__(self, requests: TrackedRequests, kind: PageKind) -> None:
        self._requests, self._kind = requests, kind
        self._tracked: dict[str, TrackedRequest] = {}
        self._ends: Sequence[tuple[TrackedRequest, int]] = ()

    @property
    def sharing(self) -> bool:
        """Whether KV of this engine's weights may be shared now."""
        return self._requests.sharing

    def unfinished(self) -> bool:
        """Whether a tracked request is not over."""
        return self._requests.unfinished()

    def get(self, request: Request) -> TrackedRequest | None:
        """A request's pages of this group; None if this group has none."""
        found = self._tracked.get(request.request_id)
        return found if found is not None and found.request is request else None

    def of(self, tracked: TrackedRequest) -> TrackedRequest:
        """A request's pages of this group."""
        request = tracked.request
        found = self.get(request)
        if found is None:
            found = self._tracked[request.request_id] = TrackedRequest(request, own=tracked.own)
        if found.keys is None and tracked.keys is not None:
            # An adapter that changed in between: nothing of this group is saved then.
            with suppress(CornplugError):
                found.keys = tracked.keys.under(self._requests.root_of(request, self._kind.geometry))
        return found

    def completed(self, ends: Sequence[tuple[TrackedRequest, int]]) -> None:
        """Take the answer of `TrackedRequests.completing` for this step."""
        self._ends = ends

    def completing(self, scheduled_tokens: Mapping[str, int], total: int) -> list[tuple[TrackedRequest, int]]:
        """Requests that may complete a page in this step, each with its computed tokens after the step."""
        return [(self.of(tracked), end) for tracked, end in self._ends]

    def look_at(self, tracked: TrackedRequest) -> None:
        """The request may complete a page in the next step that computes tokens of it."""
        self._requests.look_at(tracked)

    def forget(self, request: Request) -> None:
        """Forget a request's pages of this group."""
        if self.get(request) is not None:
            del self._tracked[request.request_id]
