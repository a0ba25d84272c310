"""Memory for a store: how much there is, that nobody cuts it short, and that it grows beside the answers."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store import arena, payload
from cornplug.store.arena import MemoryLimit, SharedArena, choose_store_size, host_memory
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.daemon import arena_growth
from cornplug.store.daemon.server import StoreServer
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.testing.store import fill, key_of, lease, reserve

from ..conftest import answers, eventually

Connect = Callable[..., PoolStore]
MIB = 1 << 20


# -- how much there is --


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A /proc and a /sys/fs/cgroup: 8 GiB of memory, 6 of them available."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cg").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n"
    )
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    return tmp_path


def _group(folder: Path, limit: str, usage: int, cache: int = 0, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def _memory(host: Path) -> MemoryLimit:
    return host_memory(proc=host / "proc", cgroups=host / "cg")


def test_host_memory_without_cgroup_limit_is_the_hosts(host: Path) -> None:
    assert _memory(host) == (8 << 30, 6 << 30, "this host's memory")
    _group(host / "cg", "max", 1 << 30)
    assert _memory(host).available_bytes == 6 << 30


def test_host_memory_in_container_is_limit_less_usage(host: Path) -> None:
    _group(host / "cg", str(4 << 30), 3 << 30, cache=1 << 30)
    assert _memory(host)[:2] == (4 << 30, 2 << 30), "the page cache is given back"


def test_host_memory_nested_cgroups_narrowest_counts(host: Path) -> None:
    (host / "proc" / "self" / "cgroup").write_text("0::/pod/engine\n")
    _group(host / "cg" / "pod" / "engine", "max", 1 << 30)
    _group(host / "cg" / "pod", str(2 << 30), 1 << 30)
    _group(host / "cg", "max", 5 << 30)
    assert _memory(host)[:2] == (2 << 30, 1 << 30)
    assert "pod" in _memory(host).limit_name


def test_host_memory_cgroup_high_counts_as_limit(host: Path) -> None:
    _group(host / "cg", str(4 << 30), 1 << 30)
    (host / "cg" / "memory.high").write_text(f"{2 << 30}\n")
    assert _memory(host)[:2] == (2 << 30, 1 << 30)


@pytest.mark.parametrize("path", ["/", "/docker/0123"], ids=["own", "the host's, which is not to be seen"])
def test_host_memory_cgroup_version_1_is_read(host: Path, path: str) -> None:
    (host / "proc" / "self" / "cgroup").write_text(f"9:name=systemd:/\n4:memory:{path}\n0::/\n")
    _group(host / "cg" / "memory", str(1 << 30), 1 << 29, version=1)
    assert _memory(host)[:2] == (1 << 30, 1 << 29)
    _group(host / "cg" / "memory", str(0x7FFFFFFFFFFFF000), 1 << 29, version=1)
    assert _memory(host).available_bytes == 6 << 30


def test_host_memory_of_this_host_is_positive() -> None:
    assert 0 < host_memory().available_bytes <= host_memory().total_bytes


def test_fitting_size_wanted_and_available_memory_give_capacity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = MemoryLimit(200 * MIB, 100 * MIB, "a cgroup")
    assert choose_store_size(64 * MIB, clamp=False, memory=memory) == 64 * MIB
    assert choose_store_size(1 << 30, clamp=True, memory=memory) == 50 * MIB
    assert choose_store_size(None, clamp=False, memory=memory) == 25 * MIB
    assert "a quarter of the 100 MiB that a cgroup has left" in caplog.text
    with expect_error(ConfigError, field="store.size_bytes", match="1024 MiB.*100 MiB"):
        choose_store_size(1 << 30, clamp=False, memory=memory)
    with expect_error(ConfigError, field="store.size_bytes"):
        choose_store_size(None, clamp=True, memory=MemoryLimit(200 * MIB, 4 * MIB, "a cgroup"))


def test_shared_arena_small_dev_shm_is_no_bound(tmp_path: Path) -> None:
    """Containers have 64 MiB of it. Here, in a namespace of its own, this process has 1 MiB."""
    code = (
        "from cornplug.store.arena import SharedArena; import os\n"
        "assert os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize == 1 << 20\n"
        "print(SharedArena(128 << 20).grow(128 << 20))\n"
    )
    inner = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && {shlex.quote(sys.executable)} -c '{code}'".replace(
        "'/dev/shm'", '"/dev/shm"'
    )
    out = subprocess.run(["unshare", "-m", "sh", "-c", inner], capture_output=True, text=True, check=False)
    if "unshare" in out.stderr or "mount" in out.stderr:
        pytest.skip("no right to mount")
    assert out.stdout == f"{128 * MIB}\n", out.stderr


# -- nobody cuts it short --


def test_shared_arena_descriptor_holder_cannot_resize_it() -> None:
    ours = SharedArena(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(ours.fd, size)
    with mmap.mmap(ours.fd, MIB) as mapped:
        mapped[:4] = b"able"
    ours.close()


# -- it runs out --


def test_shared_arena_growth_leaves_host_its_reserve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    left = MemoryLimit(100 * MIB, 12 * MIB, "a cgroup")
    monkeypatch.setattr(arena, "host_memory", lambda: left)
    ours = SharedArena(64 * MIB)
    assert [ours.grow(8 * MIB), ours.grow(8 * MIB)] == [0, 0], "5 MiB are kept free"
    assert (
        caplog.text.count("a cgroup has 12 MiB left): this store stays at 0 MiB of its 64 MiB for now") == 1
    )
    left = MemoryLimit(100 * MIB, 90 * MIB, "a cgroup")
    assert ours.grow(8 * MIB) == 8 * MIB
    assert "memory is available again" in caplog.text
    ours.close()


def test_running_out_is_survived_and_ends_when_there_is_memory_again(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serve_in_thread: Callable[..., StoreServer],
    connect: Connect,
) -> None:
    real, most = os.posix_fallocate, 16 * MIB

    def fallocate(fd: int, offset: int, size: int) -> None:
        if offset + size > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr("cornplug.store.arena.os.posix_fallocate", fallocate)
    monkeypatch.setattr("cornplug.store.daemon.arena_growth.HEADROOM_BYTES", 16 * MIB)
    monkeypatch.setattr(arena_growth, "RETRY_S", 0.1)
    running = serve_in_thread(size_bytes=64 * MIB)
    store = connect()
    fill(store, 0, b"x" * MIB)
    eventually(lambda: running._growth.exhausted)
    for number in range(1, 20):
        fill(store, number, b"x" * MIB)
    stat = store.stat(deadline_s=5)
    assert (stat.entries, stat.evictions, stat.used_bytes) == (16, 4, 16 * MIB)
    held = [lease(store, number) for number in range(4, 20)]
    assert None not in held
    assert reserve(store, "more", 1) is ReserveRefusal.FULL
    assert len([r for r in caplog.records if "out of memory" in r.message]) == 1, "said once"
    most = 64 * MIB
    eventually(lambda: isinstance(reserve(connect(), time.monotonic(), 1), Reservation))


def test_shared_arena_other_fault_than_no_room_is_raised() -> None:
    ours = SharedArena(MIB)
    os.close(ours.fd)
    with pytest.raises(OSError, match="descriptor"):
        ours.grow(1)


def test_arena_growth_fault_in_thread_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    ours = SharedArena(MIB)
    os.close(ours.fd)
    making = arena_growth.ArenaGrowth(ours)
    making.request_growth(MIB)
    eventually(lambda: making.exhausted)
    assert "no memory for the store" in caplog.text
    making.close()


# -- beside the answers --


def test_store_long_prompt_in_empty_store_finds_room_for_all_pages(
    serve_in_thread: Callable[..., StoreServer], connect: Connect
) -> None:
    """8k tokens of an 8B model: 128 pages of 8 MiB, into an empty store of 2 GiB."""
    if host_memory().available_bytes < 4 << 30:
        pytest.skip("this test wants 1 GiB of memory")
    serve_in_thread(size_bytes=2 << 30)
    store = connect()
    entries = [(key_of(n), 8 * MIB) for n in range(128)]
    first = store.reserve(entries, ReserveTerms("a"), deadline_s=30)
    refused = {answer for answer in first if isinstance(answer, ReserveRefusal)}
    assert refused <= {ReserveRefusal.GROWING}
    left = [pair for pair, answer in zip(entries, first, strict=True) if isinstance(answer, ReserveRefusal)]
    again = payload.reserve_with_retry(store, left, ReserveTerms("a"), deadline_s=60)
    assert all(isinstance(answer, Reservation) for answer in again)
    assert store.stat(deadline_s=5).evictions == 0


def test_daemon_request_during_growth_is_answered(
    monkeypatch: pytest.MonkeyPatch, serve_in_thread: Callable[..., StoreServer], connect: Connect
) -> None:
    slow, real = threading.Event(), SharedArena.grow

    def grow(self: SharedArena, want_bytes: int) -> int:
        slow.wait(30)
        return real(self, want_bytes)

    serve_in_thread(size_bytes=256 * MIB)
    store = connect()
    fill(store, "a", b"x")
    monkeypatch.setattr(SharedArena, "grow", grow)
    try:
        assert reserve(store, "large", 200 * MIB) is ReserveRefusal.GROWING
        # By a message: a lookup needs no answer of the daemon. Else it waits for the growth.
        assert store.contains_by_message([key_of("a")], deadline_s=8) == b"\1"
    finally:
        slow.set()
    (room,) = payload.reserve_with_retry(
        store, [(key_of("large"), 200 * MIB)], ReserveTerms("a"), deadline_s=30
    )
    assert isinstance(room, Reservation)


class _Growing:
    """A store whose room comes after so many questions."""

    def __init__(self, questions: int) -> None:
        self.inner = MemoryStore(capacity_bytes=MIB).connect()
        self.left = questions

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def reserve(
        self, entries: list[tuple[bytes, int]], terms: ReserveTerms, **options: object
    ) -> list[object]:
        self.left -= 1
        if self.left == 0:
            raise StoreUnavailable("gone for a moment", reason="store_timeout")
        return (
            self.inner.reserve(entries, terms, **options)
            if self.left < 0
            else [ReserveRefusal.GROWING] * len(entries)
        )  # type: ignore[arg-type]


def test_put_payload_during_growth_is_stored() -> None:
    store = _Growing(3)
    done = put_payload(
        store,
        NewPayload(b"abcd", PayloadKind.EMBEDDING, key=key_of("a"), dtype="uint8", shape=(4,)),
        app="a",
        deadline_s=5,
    )
    assert done == "stored"


def test_put_payload_without_memory_ends_at_deadline(within: TimeLimits) -> None:
    store = _Growing(10**6)
    with within(10):
        found = payload.reserve_with_retry(store, [(key_of("a"), 4)], ReserveTerms("a"), deadline_s=0.05)  # type: ignore[arg-type]
    assert found == [ReserveRefusal.GROWING]


# -- in containers --


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 256 MiB."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()
    group = (root / "memory" if first else root) / f"cornplug-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(256 * MIB))
    except OSError as e:
        pytest.skip(f"no right to make a cgroup: {e}")
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def _boxed(box: list[str], config: StoreConfig, *size: str) -> subprocess.Popen[str]:
    command = [*box, sys.executable, "-m", "cornplug.store.daemon.main", "--clamp", *size]
    command += ["--socket", str(config.socket), "--secret-file", str(config.secret_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    eventually(lambda: process.poll() is not None or answers(config.socket))
    return process


@pytest.mark.parametrize(
    "size", [[], ["--size", "1GiB"], ["--size", "220MiB"]], ids=["auto", "1GiB", "220MiB"]
)
def test_store_in_small_cgroup_fills_up_and_survives(
    cgroup: Path, store_config: StoreConfig, connect: Connect, size: list[str]
) -> None:
    process = _boxed(["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"], store_config, *size)
    try:
        store = connect()
        capacity_bytes = store.stat(deadline_s=5).capacity_bytes
        assert 40 * MIB < capacity_bytes < 256 * MIB
        for number in range(300):
            (room,) = payload.reserve_with_retry(
                store, [(key_of(number), MIB)], ReserveTerms("a"), deadline_s=5
            )
            assert isinstance(room, Reservation), room
            store.view(room.location, writable=True)[:] = b"x" * MIB
            assert store.commit([(room, b"meta")], deadline_s=5) == [True]
        stat = store.stat(deadline_s=5)
        assert stat.entries > 40
        assert stat.entries + stat.evictions == 300
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_store_in_other_namespaces_serves_clients_outside(
    store_config: StoreConfig, connect: Connect
) -> None:
    """As another pod's: other processes, other IPC, other network; they share the socket's folder alone."""
    box = ["unshare", "--pid", "--fork", "--ipc", "--net", "--mount"]
    try:
        # It ends by itself: what kills unshare leaves its child alive.
        process = _boxed(box, store_config, "--size", "16MiB", "--idle-exit-s", "0.5")
    except FileNotFoundError:
        pytest.skip("no unshare")
    stores: list[PoolStore] = []
    try:
        if process.poll() is not None:
            pytest.skip("no right to unshare")
        stores = [connect(), connect()]
        fill(stores[0], "a", b"from outside")
        held = lease(stores[1], "a")
        assert held is not None
        assert bytes(stores[1].view(held.location)) == b"from outside"
    finally:
        for store in stores:
            store.close()
        process.communicate(timeout=20)
