"""A daemon with a disk, as tests fill and read it."""

from __future__ import annotations

import random
import subprocess

from cornplug.codec import PayloadKind
from cornplug.errors import StoreUnavailable
from cornplug.store.client import PoolStore
from cornplug.store.disk.segment_files import FoundRecord, SegmentFiles
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.store.store_stats import DiskStat
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import eventually

KIB, MIB = 1 << 10, 1 << 20


def payload_of(name: object, size_bytes: int) -> bytes:
    return random.Random(repr(name)).randbytes(size_bytes)


def put(store: PoolStore, name: object, size_bytes: int = 20 * KIB, app: str = "chat") -> None:
    eventually(lambda: store.is_connected)
    outcome = put_payload(
        store,
        NewPayload(
            payload_of(name, size_bytes),
            PayloadKind.EMBEDDING,
            key=key_of(name),
            dtype="uint8",
            shape=(size_bytes,),
        ),
        app=app,
        deadline_s=DEADLINE_S,
        cost_s=0.25,
    )
    assert outcome == "stored", outcome


def get(store: PoolStore, name: object, *, recall_s: float | None = 5.0) -> bytes | None:
    found = get_payload(store, key_of(name), deadline_s=DEADLINE_S, recall_s=recall_s)
    return None if found is None else bytes(found[1])


def disk_of(store: PoolStore) -> DiskStat:
    found = store.stat(deadline_s=DEADLINE_S).disk
    assert found is not None
    return found


def written(store: PoolStore, entries: int) -> bool:
    """Whether so many entries are on disk, and none waits."""
    return scanned(store) and (disk_of(store).entries, disk_of(store).queued) == (entries, 0)


def scanned(store: PoolStore) -> bool:
    """Whether a daemon serves that knows its disk."""
    try:
        return store.is_connected and not disk_of(store).scanning
    except StoreUnavailable:
        return False


def live(files: SegmentFiles, segment: int) -> list[FoundRecord]:
    """The live records of a segment."""
    return [found for found in files.scan(segment) if found is not None]


def tier_of(store: PoolStore, name: object) -> int:
    return store.tiers([key_of(name)], deadline_s=DEADLINE_S)[0]


def end(daemon: subprocess.Popen[str]) -> None:
    daemon.terminate()
    assert daemon.wait(20) == 0
