"""One store for several containers: separate mounts, networks and process ids, 64 MiB of /dev/shm each.

They have only the socket's folder in common."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from cornplug.store.payload import NewPayload, get_payload, put_payload

from .conftest import answers, eventually

_ROOT = Path(__file__).parents[2]
_SHM_BYTES = 64 << 20
_ENTRIES, _ENTRY_BYTES = 5, 20 << 20
_CONTAINER = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount --bind /tmp /mnt
mount -t tmpfs tmpfs /tmp
while read -r folder; do
    mkdir -p "$folder"
    mount --bind "/mnt${folder#/tmp}" "$folder"
done <<<"$KEPT"
umount --lazy /mnt
exec "$@"
"""
_CLIENT = "from tests.store import test_containers; test_containers.client_main()"
_CGROUPS = Path("/sys/fs/cgroup")

Start = Callable[..., "subprocess.Popen[str]"]


def _no_namespaces(shared: Path) -> str:
    """The reason why this process cannot make a container's namespaces; "" where it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1) here"
    if os.getuid() != 0:
        return "mounts need root"
    tried = subprocess.run(_in_container("true"), env=_environment(shared), capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def _in_container(*command: str) -> list[str]:
    namespaces = ["unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*namespaces, "--propagation", "private", "bash", "-c", _CONTAINER, "container", *command]


def _environment(shared: Path) -> dict[str, str]:
    """Environment of a container: what it keeps of /tmp is the shared folder, the checkout and Python."""
    kept = [shared, _ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
    real = {folder.resolve() for folder in kept if folder.is_dir()}
    outermost = {f for f in real if f.is_relative_to("/tmp") and real.isdisjoint(f.parents)}
    return {**os.environ, "KEPT": "\n".join(map(str, sorted(outermost))), "PYTHONPATH": str(_ROOT)}


def _payload(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number).digest() * (_ENTRY_BYTES // 64)


def _key(number: int) -> bytes:
    return hashlib.blake2b(b"key %d" % number, digest_size=32).digest()


def client_main() -> None:
    """A container's client: stores or reads entries that are together larger than its /dev/shm."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize == _SHM_BYTES < _ENTRIES * _ENTRY_BYTES
    assert len(Path("/proc/net/dev").read_text().splitlines()) == 3, "no network but loopback"
    config = StoreConfig(socket=folder / "s.sock", secret_file=folder / "secret", autostart=False)
    with contextlib.closing(PoolStore(config, connect_timeout_s=30)) as store:
        for number in range(_ENTRIES):
            if what == "put":
                assert _stored(store, number) == "stored"
            else:
                found = get_payload(store, _key(number), deadline_s=20)
                assert found is not None
                assert found[1] == _payload(number)


def _stored(store: PoolStore, number: int) -> str:
    return put_payload(
        store,
        NewPayload(
            _payload(number), PayloadKind.KV_PAGE, key=_key(number), dtype="uint8", shape=(_ENTRY_BYTES,)
        ),
        app="",
        deadline_s=20,
    )


@pytest.fixture
def shared(short_path: Path) -> Path:
    """The folder that containers have in common."""
    if reason := _no_namespaces(short_path):
        pytest.skip(reason)
    return short_path


@pytest.fixture
def start_daemon_in_container(shared: Path) -> Iterator[Start]:
    """`serve-store` in a container; returns once it listens."""
    started: list[subprocess.Popen[str]] = []

    def start(*extra: str, size: str = "256MiB", before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cornplug.store.daemon.main", *extra]
        command += ["--socket", str(shared / "s.sock"), "--secret-file", str(shared / "secret")]
        command += ["--size", size] if size else []
        daemon = subprocess.Popen(
            [*before, *_in_container(*command)],
            env=_environment(shared), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(daemon)
        eventually(lambda: daemon.poll() is not None or answers(shared / "s.sock"))
        return daemon

    yield start
    for daemon in started:
        daemon.kill()  # unshare --kill-child ends the container with it
        daemon.wait()
        if daemon.stderr is not None:
            daemon.stderr.close()


def _run_client(
    shared: Path, *arguments: str, user: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = _in_container(*user, sys.executable, "-c", _CLIENT, str(shared), *arguments)
    return subprocess.run(command, env=_environment(shared), capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(300)
def test_containers_that_share_the_sockets_folder_exchange_more_than_their_shm(
    shared: Path, start_daemon_in_container: Start
) -> None:
    start_daemon_in_container()
    for what in ("put", "get"):
        client = _run_client(shared, what)
        assert client.returncode == 0, client.stderr


@pytest.mark.timeout(300)
def test_containers_client_of_another_user_is_told_the_remedy(
    shared: Path, start_daemon_in_container: Start
) -> None:
    """A folder and a secret that are root's: another uid gets neither, and learns which setting to mend."""
    start_daemon_in_container()
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv(1) here")
    user = ("setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups")
    client = _run_client(shared, "get", user=user)
    assert client.returncode != 0
    assert "store.secret_file" in client.stderr
    assert "CORNPLUG_STORE_SECRET_FILE" in client.stderr


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup of version 1 or 2 with a memory limit of 512 MiB."""
    version_1 = _CGROUPS / "memory"
    root, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (_CGROUPS, "memory.max")
    group = root / f"cornplug-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(512 << 20))
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made here: {e}")
    yield group

    def removed() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    eventually(removed)


@pytest.mark.timeout(300)
def test_containers_memory_limit_bounds_the_store(
    memory_group: Path, shared: Path, start_daemon_in_container: Start
) -> None:
    """Without a size it takes a quarter of what the limit leaves; a size above the limit is an error."""
    enter = ("bash", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "enter")
    refused = start_daemon_in_container(size="4GiB", before=enter)
    assert refused.wait(60) == 2
    message = refused.communicate()[1]
    assert "store.size_bytes" in message
    assert str(memory_group) in message
    start_daemon_in_container(size="", before=enter)
    config = StoreConfig(socket=shared / "s.sock", secret_file=shared / "secret", autostart=False)
    with contextlib.closing(PoolStore(config, connect_timeout_s=30)) as store:
        assert 0 < store.stat(deadline_s=20).capacity_bytes <= 128 << 20
        for number in range(2 * _ENTRIES):
            _stored(store, number)
        found = get_payload(store, _key(2 * _ENTRIES - 1), deadline_s=20)
        assert found is not None
        assert found[1] == _payload(2 * _ENTRIES - 1)
