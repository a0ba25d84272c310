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
_RECORD_TIMEOUT_S: Final = 0.1
"""Maximum seconds to wait, once per adapter, until the times and sizes of its files have been read. The
engine loads the files afterwards."""
_CHECK_TIMEOUT_S: Final = 0.005
"""Maximum seconds that a request waits for the check of its adapter's files, which usually takes about 0.05
ms."""
_file_states: Final[dict[_Load, _Signature]] = {}
"""State (times, sizes, inodes) of an adapter's files when this process first saw the adapter's load, by
load."""
_first_states: Final[dict[str, _Signature]] = {}
"""State of the adapter files in each folder when an adapter was first loaded from the folder, by folder."""
_rewritten: Final[set[str]] = set()
"""Folders whose files changed between two loads, so they contained another adapter before. The engine's own
cache may contain KV of either adapter."""
_unchecked: Final[set[_Load]] = set()
"""Loads of adapters whose files could not be checked before the engine loaded them. KV of these adapters is
not shared."""
_reread_ids: Final[set[int | str]] = set()
"""Ids of adapters whose files the engine reads again while it serves requests."""
_executor: Final = ThreadPoolExecutor(4, "cornplug-adapters")
"""Threads that read adapter files. If a file system hangs, it blocks only one of these threads."""


def record_files(path: str, load_id: int | str = 0) -> None:
    """Record the state of an adapter's files before an engine loads them under the id `load_id`.

    If the files change later, KV of the adapter is not shared, because the engine may run either version.
    Raises the same CheckpointErrors as `LoraDigests.digest`.
    """
    if (path, load_id) not in _file_states:
        signature = _stable_signature(path)
        if _first_states.setdefault(path, signature) != signature:
            _rewritten.add(path)
        _file_states[path, load_id] = signature


def record_files_in_time(path: str, load_id: int | str) -> None:
    """Call `record_files` on another thread and wait with a timeout, because the calling thread must not read
    files. If the files cannot be read in time, KV of the adapter is not shared."""
    if (path, load_id) in _file_states or (path, load_id) in _unchecked:
        return
    noting = _executor.submit(record_files, path, load_id)
    try:
        noting.exception(_RECORD_TIMEOUT_S)  # A later call of `digest` raises the error.
    except TimeoutError:
        _unchecked.add((path, load_id))


def was_rewritten(path: str) -> bool:
    """Return whether this process loaded another adapter from this folder before."""
    return path in _rewritten


def record_reread(load_id: int | str) -> None:
    """Record that the engine reads the files of the adapter with this id again while it serves requests.

    vLLM does so in every step after a load with `load_inplace`. It is then unknown which version of the files
    vLLM runs, until the adapter is loaded under another id.
    """
    _reread_ids.add(load_id)


def is_reread(load_id: int | str) -> bool:
    """Return whether the engine reads the files of the adapter with this id again while it serves
    requests."""
    return load_id in _reread_ids


def reread_count() -> int:
    """Return the number of adapters whose files the engine reads again while it serves requests."""
    return len(_reread_ids)


class BackgroundLoraDigests:
    """Computes digests of LoRA adapters on other threads, for a thread that must not read files."""

    def __init__(self) -> None:
        self._lora_digests = LoraDigests()
        self._slow_checks: dict[_Load, Future[bytes]] = {}
        """Checks of adapter files that took longer than `_CHECK_TIMEOUT_S` and may still be running."""

    def read_digest(self, path: str, load_id: int | str) -> bytes:
        """Return the same digest as `LoraDigests.digest`. Call this only on a thread that may read files."""
        return self._lora_digests.digest(path, load_id)

    def digest(self, path: str, load_id: int | str = 0) -> bytes:
        """Return the digest of an adapter's files, without waiting for a slow file system.

        Raises the same errors as `LoraDigests.digest`, and CheckpointError("identifying") while files are
        read.
        """
        record_files_in_time(path, load_id)
        late = self._slow_checks.get((path, load_id))
        if late is not None and not late.done():
            raise _identifying_error(path)
        look = _executor.submit(self._lora_digests.digest, path, load_id)
        try:
            found = look.result(_CHECK_TIMEOUT_S)
        except TimeoutError:
            self._slow_checks[path, load_id] = look
            raise _identifying_error(path) from None
        self._slow_checks.pop((path, load_id), None)
        return found


class LoraDigests:
    """Computes the digests of LoRA adapters' files, once per load of an adapter."""

    def __init__(self) -> None:
        self._digests: dict[_Load, bytes] = {}

    def digest(self, path: str, load_id: int | str = 0) -> bytes:
        """Return the digest of an adapter's files, which the engine loaded under the id `load_id`.

        Raises CheckpointError: "lora" if the files cannot be read, "lora_files" if vLLM and SGLang would load
        different files, "lora_changed" if the files changed since the first call.
        """
        if (path, load_id) in _unchecked:
            raise CheckpointError(
                f"adapter {path}: cornplug could not read its files before the engine loaded them",
                reason="lora",
            )
        record_files(path, load_id)
        if (path, load_id) not in self._digests:
            try:
                parts = [digest("cornplug-adapter-file-v1", f.read_bytes()) for f in _adapter_files(path)]
            except OSError as e:
                raise _unreadable_error(path, e) from e
            self._digests[path, load_id] = digest("cornplug-adapter-v1", *parts)
        if _file_states[path, load_id] != _signature(path):
            raise CheckpointError(
                f"the files of adapter {path} changed after the engine loaded them", reason="lora_changed"
            )
        return self._digests[path, load_id]


def _identifying_error(path: str) -> CheckpointError:
    return CheckpointError(f"cornplug is still reading adapter {path}", reason="identifying")


def _adapter_files(path: str) -> list[Path]:
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
        stats = [file.stat() for file in _adapter_files(path)]
    except OSError as e:
        raise _unreadable_error(path, e) from e
    return tuple((s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for s in stats)


def _stable_signature(path: str) -> _Signature:
    """Return `_signature`. If the files are very new, first wait up to 30 ms, because a change within the
    same clock tick would not change their timestamps."""
    for _ in range(30):
        now_ns = time.clock_gettime_ns(engine_state.FILE_CLOCK)
        signature = _signature(path)
        if all(changed_ns < now_ns for _, changed_ns, _, _ in signature):
            break
        time.sleep(0.001)
    return signature


def _unreadable_error(path: str, e: OSError) -> CheckpointError:
    return CheckpointError(f"adapter {path}: cannot read {e.filename}: {e.strerror}", reason="lora")
