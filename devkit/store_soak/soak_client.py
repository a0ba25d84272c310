"""One client of the soak: it reads, writes, leases and deletes until SIGTERM, and checks every byte.

    python -m devkit.store_soak.soak_client SOCKET SECRET REPORT SEED INDEX LIFE

REPORT is written anew twice a second and after every wrong byte: a kill costs half a second of counts.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cornplug import codec
from cornplug.config import StoreConfig
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import Lease, Reservation, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.payload import NewPayload, get_payload, get_payload_into, put_payload
from devkit.store_soak.soak_payload import KEYS, SIZES, key_of, payload_of, size_of

DEADLINE_S: Final = 0.5
_RECALL_S: Final = 0.5
_REPORT_S: Final = 0.5
_IDLE_S: Final = 0.02
"""Between two tries while no store answers."""


class ClientReport(msgspec.Struct):
    """Counts of one client process since it began."""

    operations: dict[str, int]
    hits: int = 0
    misses: dict[str, int] = {}
    checked_bytes: int = 0
    wrong: list[str] = []
    """A line for each entry with wrong bytes."""
    longest_s: dict[str, float] = {}
    """Operation -> its longest time, copies and their check included."""


class SoakClient:
    """The load of one process.

    Args:
        seed: Names the entries; those of one seed are shared by all clients of a run.
        index: Of the client, for its own order of operations.
        life: How often this client was killed before.
    """

    def __init__(self, store: PoolStore, report: Path, seed: int, index: int, life: int) -> None:
        self._store, self._path, self._seed, self._index = store, report, seed, index
        self._chance = random.Random(f"{seed} {index} {life}")
        self._target = memoryview(bytearray(SIZES[-1]))
        self._operations: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._longest_s: dict[str, float] = {}
        self._report = ClientReport({}, longest_s=self._longest_s)
        self._reported_s = 0.0

    def step(self) -> None:
        """One operation, chosen by chance. No failure of the store raises."""
        kinds = (
            self._copy,
            self._copy_into,
            self._leased,
            self._lookup,
            self._put,
            self._abandon,
            self._drop,
        )
        (operation,) = self._chance.choices(kinds, (30, 20, 22, 14, 8, 4, 2))
        began_s = time.monotonic()
        try:
            operation()
        except StoreUnavailable as e:
            self._misses[e.reason] += 1
            time.sleep(_IDLE_S)
        except CodecError as e:
            self._misses[e.reason] += 1
        name, took_s = operation.__name__.strip("_"), time.monotonic() - began_s
        self._operations[name] += 1
        self._longest_s[name] = max(self._longest_s.get(name, 0.0), took_s)
        if time.monotonic() >= self._reported_s + _REPORT_S:
            self.write_report()

    def write_report(self) -> None:
        """Replace the report file."""
        self._report.operations, self._report.misses = dict(self._operations), dict(self._misses)
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self._report))
        draft.replace(self._path)
        self._reported_s = time.monotonic()

    def _key(self) -> bytes:
        # Low numbers more often: a part of the entries stays in memory, another goes to disk.
        return key_of(self._seed, int(KEYS * self._chance.random() ** 2))

    def _copy(self) -> None:
        key = self._key()
        found = get_payload(self._store, key, deadline_s=DEADLINE_S, recall_s=_RECALL_S)
        if found is None:
            self._miss(key)
        else:
            self._check(key, found[1], "copy")

    def _copy_into(self) -> None:
        key = self._key()
        target = self._target[: size_of(key)]
        try:
            header = get_payload_into(self._store, key, target, deadline_s=DEADLINE_S)
        except ValueError as e:
            self._wrong(f"copy_into of {key.hex()}: {e}")
            return
        if header is None:
            self._miss(key)
        else:
            self._check(key, target, "copy_into")

    def _leased(self) -> None:
        keys = list(dict.fromkeys(self._key() for _ in range(self._chance.randint(1, 6))))
        leases = self._store.lease(keys, ttl_s=30, deadline_s=DEADLINE_S)
        try:
            for key, lease in zip(keys, leases, strict=True):
                if lease is None:
                    self._misses["absent"] += 1
                else:
                    self._check_leased(key, lease)
        finally:
            with contextlib.suppress(StoreUnavailable):
                self._store.release(leases.unique_tokens, deadline_s=DEADLINE_S)

    def _check_leased(self, key: bytes, lease: Lease) -> None:
        header, view = codec.decode_header(lease.meta, key=key), self._store.view(lease.location)
        codec.verify_checksums(header, view)
        self._check(key, view, "leased")

    def _lookup(self) -> None:
        keys = [self._key() for _ in range(64)]
        if len(self._store.contains(keys, deadline_s=DEADLINE_S)) != len(keys):
            self._wrong("lookup: another number of answers than of keys")

    def _put(self) -> None:
        self._put_entry(self._key())

    def _abandon(self) -> None:
        """Half a write that its writer gives up."""
        key = self._key()
        answer = self._store.reserve([(key, size_of(key))], ReserveTerms("soak-half"), deadline_s=DEADLINE_S)[
            0
        ]
        if isinstance(answer, Reservation):
            view = self._store.view(answer.location, writable=True)
            view[: len(view) // 2] = bytes(len(view) // 2)
            self._store.release([answer.token], deadline_s=DEADLINE_S)

    def _drop(self) -> None:
        self._store.delete([self._key()], deadline_s=DEADLINE_S)

    def _miss(self, key: bytes) -> None:
        self._misses["absent"] += 1
        self._put_entry(key)

    def _put_entry(self, key: bytes) -> None:
        payload = payload_of(key)
        outcome = put_payload(
            self._store,
            NewPayload(payload, codec.PayloadKind.EMBEDDING, key=key, dtype="uint8", shape=(len(payload),)),
            app=f"soak-{self._index % 3}",
            deadline_s=DEADLINE_S,
        )
        self._operations[f"put: {outcome}"] += 1

    def _check(self, key: bytes, payload: bytes | bytearray | memoryview, how: str) -> None:
        if payload != payload_of(key):
            self._wrong(f"{how} of {key.hex()}: other bytes than were written")
            return
        self._report.hits += 1
        self._report.checked_bytes += len(payload)

    def _wrong(self, line: str) -> None:
        self._report.wrong.append(line)
        self.write_report()


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM. Exit status 0; any error of the client itself ends the process with a traceback."""
    socket, secret, report, seed, index, life = argv
    config = StoreConfig(socket=Path(socket), secret_file=Path(secret), autostart=False)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with contextlib.closing(PoolStore(config, connect_timeout_s=5)) as store:
        client = SoakClient(store, Path(report), int(seed), int(index), int(life))
        while not ended:
            client.step()
        client.write_report()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
