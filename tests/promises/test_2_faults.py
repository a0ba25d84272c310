"""Faults under a steady stream: every request is answered as stock answers, the reason is counted, and
sharing resumes."""

from __future__ import annotations

import pytest
from integration.faults import Subject, arena_corrupted, encoder_killed, store_hung, store_killed
from integration.stack import ASKS, Stack

EACH = pytest.mark.parametrize("subject", ["vllm", "sglang"], indirect=True, scope="module")
VLLM = pytest.mark.parametrize("subject", ["vllm"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def subject(apps: Stack, request: pytest.FixtureRequest) -> Subject:
    """An engine whose prompts are in the store. Durations are asserted in script/test-more only."""
    engine = {"vllm": ("a", "q", "q"), "sglang": ("s", "q", "sglang:q")}[request.param]
    found = Subject(apps.servers[engine[0]], engine[1], engine[2], neighbour="b", noise_s=None)
    for ask in ASKS:
        ask.put(found.server)
    return found


@EACH
@pytest.mark.support("Faults", "the store is killed", engine="{subject}")
def test_store_killed(apps: Stack, subject: Subject) -> None:
    store_killed(apps, subject)


@VLLM
@pytest.mark.support("Faults", "the store hangs", engine="{subject}")
def test_store_hung(apps: Stack, subject: Subject) -> None:
    store_hung(apps, subject)


@EACH
@pytest.mark.support("Faults", "stored bytes are damaged", engine="{subject}")
def test_page_damaged(apps: Stack, subject: Subject) -> None:
    arena_corrupted(apps, subject)


@EACH
@pytest.mark.support("Faults", "the encoder service is killed", engine="{subject}")
def test_encoder_killed(apps: Stack, subject: Subject) -> None:
    encoder_killed(apps, subject)
