"""Identification of LoRA adapters by digests of their files, independent of the adapters' names.

An engine loads an adapter's files once per adapter id. Rewritten files count as a new adapter if they are
loaded under a new id. If they are loaded under an id that the engine has already loaded, it is unknown which
version the engine runs.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from cornplug.engine_common import engine_state
from cornplug.errors import CheckpointError
from cornplug.identity import digest

_Signature = tuple[tuple[int, ...], ...]
_Load = tuple[str, int | str]
"""One load of an adapter: (folder with the adapter's files, the engine's id for the adapter)."""
_WEIGHTS: Final = "adapter_model.safetensors"
_NOTE_S: Final = 0.1
"""Maximum seconds to wait for the state (time, size) of an adapter's files to be read before the engine loads
them, once per adapter."""
_CHECK_S: Final = 0.005
"""Maximum seconds that a request waits for the check of its adapter's files, which usually takes about 0.05
ms."""
_noted: Final[dict[_Load, _Signature]] = {}
"""State (times, sizes, inodes) of each adapter's files when this process first saw that load of the
adapter."""
_first: Final[dict[str, _Signature]] = {}
"""State of the adapter files in each folder at the first load from it, by folder."""
_rewritten: Final[set[str]] = set()
"""Folders whose files have been rewritten between two loads, so that they contained another adapter before.
The engine's own cache may contain KV of either adapter."""
_unseen: Final[set[_Load]] = set()
"""Loads of adapters whose files could not be checked before the engine loaded them. These adapters are not
shared."""
_reread: Final[set[int | str]] = set()
"""Ids of adapters whose files the engine reads again while it handles requests."""
_threads: Final = ThreadPoolExecutor(4, "cornplug-adapters")
"""Threads that read the files of adapters. A file system that hangs blocks only one of these threads."""


def note(path: str, load: int | str = 0) -> None:
    """Record the state of an adapter's files before an engine loads them under the id `load`.

    If the files change later, the adapter is not shared, because the engine may run either version. Raises
    CheckpointError like `LoraDigests.digest`.
    """
    if (path, load) not in _noted:
        signature = _settled_signature(path)
        if _first.setdefault(path, signature) != signature:
            _rewritten.add(path)
        _noted[path, load] = signature


def note_in_time(path: str, load: int | str) -> None:
    """Call `note` on another thread and wait with a timeout, because the calling thread must not read files.
    An adapter whose files cannot be read in time is not shared."""
    if (path, load) in _noted or (path, load) in _unseen:
        return
    noting = _threads.submit(note, path, load)
    try:
        noting.exception(_NOTE_S)  # `digest` raises the error again.
    except TimeoutError:
        _unseen.add((path, load))


def was_rewritten(path: str) -> bool:
    """Return whether this folder contained another adapter when this process loaded an adapter from it
    before."""
    return path in _rewritten


def note_reread(load: int | str) -> None:
    """Record that the engine reads the files of the adapter with this id again while it handles requests.

    vLLM does so in every step after a load with `load_inplace`. The version that it runs is unknown until the
    adapter is loaded under another id.
    """
    _reread.add(load)


def is_reread(load: int | str) -> bool:
    """Return whether the engine reads the files of the adapter with this id again while it handles
    requests."""
    return load in _reread


def rereads() -> int:
    """Return the number of adapters whose files the engine reads again while it handles requests."""
    return len(_reread)


class LaterAdapters:
    """Computes digests of LoRA adapters on other threads, for a thread that must not read files."""

    def __init__(self) -> None:
        self._adapters = LoraDigests()
        self._late: dict[_Load, Future[bytes]] = {}
        """Checks of adapter files that took longer than `_CHECK_S` and may still be running."""

    def read(self, path: str, load: int | str) -> bytes:
        """Return the digest of an adapter's files like `LoraDigests.digest`. Call it only from a thread that
        may read files."""
        return self._adapters.digest(path, load)

    def digest(self, path: str, load: int | str = 0) -> bytes:
        """Return the digest of an adapter's files, without waiting for a slow file system.

        Raises like `LoraDigests.digest`, and CheckpointError("identifying") while the files are being read.
        """
        note_in_time(path, load)
        late = self._late.get((path, load))
        if late is not None and not late.done():
            raise _identifying(path)
        look = _threads.submit(self._adapters.digest, path, load)
        try:
            found = look.result(_CHECK_S)
        except TimeoutError:
            self._late[path, load] = look
            raise _identifying(path) from None
        self._late.pop((path, load), None)
        return found


class LoraDigests:
    """Computes the digests of LoRA adapters' files, once per load of an adapter."""

    def __init__(self) -> None:
        self._known: dict[_Load, bytes] = {}

    def digest(self, path: str, load: int | str = 0) -> bytes:
        """Return the digest of an adapter's files, which the engine loaded under the id `load`.

        Raises CheckpointError: "lora" if they cannot be read, "lora_files" if engines would load different
        files, "lora_changed" if they changed since the first call.
        """
        if (path, load) in _unseen:
            raise CheckpointError(
                f"adapter {path}: cornplug could not read its files before the engine loaded them",
                reason="lora",
            )
        note(path, load)
        if (path, load) not in self._known:
            try:
                parts = [digest("cornplug-adapter-file-v1", f.read_bytes()) for f in _files(path)]
            except OSError as e:
                raise _unreadable(path, e) from e
            self._known[path, load] = digest("cornplug-adapter-v1", *parts)
        if _noted[path, load] != _signature(path):
            raise CheckpointError(
                f"the files of adapter {path} changed after the engine loaded them", reason="lora_changed"
            )
        return self._known[path, load]


def _identifying(path: str) -> CheckpointError:
    return CheckpointError(f"cornplug is still reading adapter {path}", reason="identifying")


def _files(path: str) -> list[Path]:
    folder = Path(path)
    others = sorted(f.name for f in folder.glob("*.safetensors") if f.name != _WEIGHTS)
    if others:
        # SGLang loads every safetensors file in the folder, but vLLM loads only the file with this name.
        raise CheckpointError(
            f"adapter {path} has weights in {', '.join(others)} too; keep only {_WEIGHTS}",
            reason="lora_files",
        )
    return [folder / "adapter_config.json", folder / _WEIGHTS]


def _signature(path: str) -> _Signature:
    try:
        stats = [file.stat() for file in _files(path)]
    except OSError as e:
        raise _unreadable(path, e) from e
    return tuple((s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for s in stats)


def _settled_signature(path: str) -> _Signature:
    """Return `_signature`, but wait up to 30 ms while the files are so new that another change in the same
    tick of the clock would leave their timestamps as they are."""
    for _ in range(30):
        now_ns = time.clock_gettime_ns(engine_state.FILE_CLOCK)
        signature = _signature(path)
        if all(changed_ns < now_ns for _, changed_ns, _, _ in signature):
            break
        time.sleep(0.001)
    return signature


def _unreadable(path: str, e: OSError) -> CheckpointError:
    return CheckpointError(f"adapter {path}: cannot read {e.filename}: {e.strerror}", reason="lora")
