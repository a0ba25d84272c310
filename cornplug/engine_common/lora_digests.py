"""LoRA adapters as identities: the bytes of their files, never their names."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from cornplug.errors import CheckpointError
from cornplug.identity import digest

_Signature = tuple[tuple[int, ...], ...]
_WEIGHTS: Final = "adapter_model.safetensors"
_noted: Final[dict[str, _Signature]] = {}
"""Folder -> its files as they were when this process first heard of it."""


def note(path: str) -> None:
    """Remember the state of an adapter's files before an engine loads them.

    A later change is refused: the engine may run either version. Raises CheckpointError as
    `LoraDigests.digest`.
    """
    if path not in _noted:
        _noted[path] = _signature(path)


class LaterAdapters:
    """Digests of LoRA adapters for a thread that must not read files: another thread reads them."""

    def __init__(self) -> None:
        self._adapters = LoraDigests()
        self._thread = ThreadPoolExecutor(1, "cornplug-adapters")
        self._read: dict[str, Future[bytes]] = {}

    def digest(self, path: str) -> bytes:
        """As `LoraDigests.digest`. Raises CheckpointError("identifying") as well, while it is being read."""
        if path not in self._read:
            with suppress(CheckpointError):  # said again by the thread
                note(path)
            self._read[path] = self._thread.submit(self._adapters.digest, path)
        if not self._read[path].done():
            raise CheckpointError(f"adapter {path} is being read", reason="identifying")
        if self._read[path].exception() is not None:
            self._read.pop(path).result()
        # Read already: this only looks whether its files are still the same.
        return self._adapters.digest(path)


class LoraDigests:
    """Digests of LoRA adapters, read once for each path."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def digest(self, path: str) -> bytes:
        """Digest of an adapter's files.

        Raises CheckpointError: "lora" when they cannot be read, "lora_files" where engines disagree on
        which of them count, "lora_changed" when they are no longer those of the first time.
        """
        note(path)
        if path not in self._known:
            try:
                parts = [digest("cornplug-adapter-file-v1", f.read_bytes()) for f in _files(path)]
            except OSError as e:
                raise _unreadable(path, e) from e
            self._known[path] = digest("cornplug-adapter-v1", *parts)
        if _noted[path] != _signature(path):
            raise CheckpointError(f"adapter {path} was changed under the engine", reason="lora_changed")
        return self._known[path]


def _files(path: str) -> list[Path]:
    folder = Path(path)
    others = sorted(f.name for f in folder.glob("*.safetensors") if f.name != _WEIGHTS)
    if others:
        # SGLang loads every safetensors file of the folder, vLLM the one of this name.
        raise CheckpointError(
            f"adapter {path} has weights in {', '.join(others)} too; leave {_WEIGHTS} alone there",
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
