"""Identities of LoRA adapters: digests of their files, independent of their names.

An engine loads an adapter's files once per adapter id. If the files are rewritten, they are a new adapter
under a new id, but may be either version under an id that the engine already knew.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from cornplug.errors import CheckpointError
from cornplug.identity import digest

_Signature = tuple[tuple[int, ...], ...]
_Load = tuple[str, int | str]
"""Folder of an adapter, and the engine's id for it."""
_WEIGHTS: Final = "adapter_model.safetensors"
_NOTE_S: Final = 0.1
"""Maximum wait for reading the state of an adapter's files before the engine loads them, once per adapter."""
_CHECK_S: Final = 0.005
"""Maximum wait for a request's check of an adapter's files, which takes about 0.05 ms."""
_noted: Final[dict[_Load, _Signature]] = {}
"""State of each adapter's files when this process first saw the adapter."""
_first: Final[dict[str, _Signature]] = {}
"""Folder -> state of its files at the first load."""
_rewritten: Final[set[str]] = set()
"""Folders whose files belonged to another adapter before. The engine's own cache may contain KV of either
adapter.
"""
_unseen: Final[set[_Load]] = set()
"""Adapters whose files could not be checked before the engine loaded them."""
_reread: Final[set[int | str]] = set()
"""The engine's ids of adapters whose files it reads again while it handles requests."""
_threads: Final = ThreadPoolExecutor(4, "cornplug-adapters")
"""Threads that read files. A hanging file system blocks one of them."""


def note(path: str, load: int | str = 0) -> None:
    """Record the state of an adapter's files before an engine loads them.

    A later change is refused, because the engine may run either version. Raises CheckpointError like
    `LoraDigests.digest`.
    """
    if (path, load) not in _noted:
        signature = _signature(path)
        if _first.setdefault(path, signature) != signature:
            _rewritten.add(path)
        _noted[path, load] = signature


def note_in_time(path: str, load: int | str) -> None:
    """Call `note` with a timeout, from a thread that must not read files. An adapter whose files do not
    respond is not shared."""
    if (path, load) in _noted or (path, load) in _unseen:
        return
    noting = _threads.submit(note, path, load)
    try:
        noting.exception(_NOTE_S)  # `digest` raises the error again.
    except TimeoutError:
        _unseen.add((path, load))


def was_rewritten(path: str) -> bool:
    """Return whether the folder had another adapter when this process loaded it before."""
    return path in _rewritten


def note_reread(load: int | str) -> None:
    """Record that the engine reads this adapter's files again while it handles requests.

    vLLM does so in every step after a load with `load_inplace`. The version of such an adapter is unknown
    until it is loaded under another id.
    """
    _reread.add(load)


def is_reread(load: int | str) -> bool:
    """Return whether `note_reread` was called for this adapter."""
    return load in _reread


def rereads() -> int:
    """Return the number of adapters that `note_reread` recorded."""
    return len(_reread)


class LaterAdapters:
    """Digests of LoRA adapters for a thread that must not read files. Other threads read them."""

    def __init__(self) -> None:
        self._adapters = LoraDigests()
        self._late: dict[_Load, Future[bytes]] = {}
        """Checks that took longer than `_CHECK_S`."""

    def read(self, path: str, load: int | str) -> bytes:
        """Call `LoraDigests.digest`, from a thread that may read files."""
        return self._adapters.digest(path, load)

    def digest(self, path: str, load: int | str = 0) -> bytes:
        """Return the digest of an adapter's files. Raises as `LoraDigests.digest`, and
        CheckpointError("identifying") while the files are read.
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
    """Digests of LoRA adapters, computed once per load of an adapter."""

    def __init__(self) -> None:
        self._known: dict[_Load, bytes] = {}

    def digest(self, path: str, load: int | str = 0) -> bytes:
        """Return the digest of an adapter's files.

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
        # SGLang loads every safetensors file of the folder, vLLM only the file with this name.
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


def _unreadable(path: str, e: OSError) -> CheckpointError:
    return CheckpointError(f"adapter {path}: cannot read {e.filename}: {e.strerror}", reason="lora")
