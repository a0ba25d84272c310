"""An entry of the host's store as its table shows it: read without a message, held by no lease."""

from __future__ import annotations

from dataclasses import dataclass

from cornplug.store.arena import MappedArena
from cornplug.store.base import Unfound
from cornplug.store.table.entry_table import EntryRecord, MappedEntryTable
from cornplug.store.table.use_notes import ClientNotes


@dataclass(frozen=True, slots=True)
class TableEntry:
    """An `UnleasedEntry` of one connection."""

    record: EntryRecord
    payload: memoryview
    table: MappedEntryTable
    notes: ClientNotes

    @property
    def meta(self) -> bytes:
        return self.record.meta

    def confirm(self) -> bool:
        if not self.table.still(self.record):
            return False
        self.notes.hit(self.record.number)
        return True


def find(
    key: bytes, arena: MappedArena, table: MappedEntryTable, notes: ClientNotes | None
) -> TableEntry | Unfound:
    """As `UnleasedReads.find_unleased`. Raises StoreUnavailable once the daemon has ended well."""
    if notes is None:
        return Unfound.UNKNOWN
    number = table.find(key)
    if number == 0:
        notes.miss()
        return Unfound.ABSENT
    record = table.read(number)
    if record is None or record.offset + record.size > arena.capacity_bytes:
        return Unfound.UNKNOWN
    return TableEntry(record, arena.bytes_at(record.offset, record.size), table, notes)
