"""Folders and buckets: what their servers make slow, and what they do not have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cornplug.store.far.object_store import open_folder_url, open_s3_url
from cornplug.store.far.open_far import TRANSFER_TIMEOUT_S, FarFailure, FarStore

from .far_stage import SlowWire

NAMES = [f"cp1/{number:064x}" for number in range(64)]
"""As many as a store deletes at once."""


@pytest.fixture
def slow(s3: str, s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarStore]:
    """A bucket whose server is 30 ms away."""
    wire = SlowWire(s3_port, 0.03)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    yield open_s3_url(s3)
    wire.close()


@pytest.mark.more
def test_object_store_bucket_far_away_deletes_a_batch_within_the_deadline(s3: str, slow: FarStore) -> None:
    near, there = open_s3_url(s3), NAMES[::9]
    for name in there:
        near.put(name, b"record")
    assert near.exists([*there, "cp1/none"]) == [True] * len(there) + [False]
    began_s = time.monotonic()
    slow.delete(NAMES)
    assert time.monotonic() - began_s < TRANSFER_TIMEOUT_S / 2
    assert near.exists(there) == [False] * len(there)


def test_object_store_folder_deletes_a_batch_of_which_it_lacks_some(share: Path) -> None:
    folder = open_folder_url(f"file://{share}")
    for name in NAMES[::2]:
        folder.put(name, b"record")
    folder.delete(NAMES)
    assert folder.exists(NAMES) == [False] * 64


@pytest.mark.more
def test_object_store_bucket_that_is_not_there_takes_no_record(s3: str) -> None:
    other = open_s3_url("s3://no-such-bucket/cornplug")
    with pytest.raises(FarFailure):
        other.put(NAMES[0], b"record")
