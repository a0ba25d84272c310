"""Four formats of traces, and errors that name the line."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.replay import TokenCost, TraceAccess, TraceRequest, distinct_bytes, read_trace
from cornplug.store.base import ReserveTerms
from cornplug.store.daemon.access_log import AccessLog
from cornplug.store.daemon.entry_watchers import EntryWatchers
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.testing.store import key_of

COST = TokenCost(kv_bytes=10, prefill_s=1e-3, seconds_per_byte=0.5)
MOONCAKE = Path(__file__).parents[2] / "benchmarks" / "traces"


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_read_trace_mooncake_block_has_512_tokens(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7, 0]}
    blocks = tuple(TraceAccess(key, 5120, 0.512) for key in (0, 7))
    assert read_trace(write(tmp_path, line), COST) == [TraceRequest(1.5, "default", blocks, is_prefix=True)]


def test_read_trace_qwen_type_becomes_app(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 16, "output_length": 1}
    path = write(tmp_path, line | {"type": "image", "turn": 1, "hash_ids": [9]})
    assert read_trace(path, COST) == [
        TraceRequest(2.5, "image", (TraceAccess(9, 160, 0.016),), is_prefix=True)
    ]


def test_read_trace_oracle_general_gives_one_access_each(tmp_path: Path) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(struct.pack("<IQIq", 3, 2**63 + 1, 100, -1) + struct.pack("<IQIq", 4, 5, 8, 2))
    assert read_trace(path, COST) == [
        TraceRequest(3.0, "default", (TraceAccess(2**63 + 1, 100, 50.0),), is_prefix=False),
        TraceRequest(4.0, "default", (TraceAccess(5, 8, 4.0),), is_prefix=False),
    ]


def test_read_trace_log_of_store_gives_reads_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = AccessLog(path)
    index = StoreIndex(
        bytes(16),
        1 << 20,
        times=ReservationTimes(0.0),
        grow=lambda missing: missing,
        watchers=EntryWatchers(log=log),
    )
    for name in "ab":
        (room,) = index.reserve(1, [(key_of(name), 100)], ReserveTerms("chat", cost_s=0.25), now_s=1.0)
        assert index.commit(1, room.token, b"")  # type: ignore[union-attr]
    index.lease(1, [key_of("a"), key_of("absent"), key_of("b")], ttl_s=9.0, now_s=2.0)
    log.close()
    a, b = (TraceAccess(int.from_bytes(key_of(name)[:8]), 128, 0.25) for name in "ab")
    assert read_trace(path, COST) == [
        TraceRequest(1.0, "chat", (a,), is_prefix=False),
        TraceRequest(1.0, "chat", (b,), is_prefix=False),
        TraceRequest(2.0, "chat", (a, b), is_prefix=False),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_access_log_ends_at_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = AccessLog(path, max_bytes=200)
    index = StoreIndex(
        bytes(16),
        1 << 20,
        times=ReservationTimes(0.0),
        grow=lambda missing: missing,
        watchers=EntryWatchers(log=log),
    )
    for name in range(50):
        (room,) = index.reserve(1, [(key_of(name), 64)], ReserveTerms("chat"), now_s=1.0)
        assert index.commit(1, room.token, b"")  # type: ignore[union-attr]
    log.close()
    assert 0 < path.stat().st_size <= 200
    assert len(read_trace(path, COST)) == path.read_bytes().count(b"\n")


def test_access_log_in_no_folder_names_the_setting(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="store.access_log"):
        AccessLog(tmp_path / "absent" / "log.jsonl")


@pytest.mark.parametrize("text", ['{"timestamp": 1}', '{"timestamp": 1, "hash_ids": ["x"]}', '{"t": 1,'])
def test_read_trace_wrong_line_raises_its_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n' + text + "\n")
    with expect_error(ConfigError, field=f"{path}:2"):
        read_trace(path, COST)


def test_read_trace_cut_or_absent_file_raises_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(bytes(25))
    with expect_error(ConfigError, field=str(path), match="25"):
        read_trace(path, COST)
    with expect_error(ConfigError, field=str(tmp_path / "absent")):
        read_trace(tmp_path / "absent", COST)
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(b"{" * 1000)[:-6])
    with expect_error(ConfigError, field=str(packed)):
        read_trace(packed, COST)


@pytest.mark.parametrize(
    ("name", "requests", "blocks"),
    [pytest.param("conversation", 12031, 182790, marks=pytest.mark.more), ("synthetic", 3993, None)],
)
def test_read_trace_shipped_files_have_mooncakes_counts(name: str, requests: int, blocks: int | None) -> None:
    trace = read_trace(MOONCAKE / f"mooncake_{name}.jsonl.gz", TokenCost())
    assert len(trace) == requests
    if blocks is not None:
        assert distinct_bytes(trace) == blocks * 512 * TokenCost().kv_bytes
