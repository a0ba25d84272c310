"""LoRA adapters as identities: the bytes of their files, never their names."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cornplug.errors import CheckpointError
from cornplug.identity import digest


class LaterAdapters:
    """Digests of LoRA adapters for a thread that must not read files: a thread of its own does."""

    def __init__(self) -> None:
        self._adapters = Adapters()
        self._thread = ThreadPoolExecutor(1, "cornplug-adapters")
        self._read: dict[str, Future[bytes]] = {}

    def digest(self, path: str) -> bytes:
        """As `Adapters.digest`. Raises CheckpointError("identifying") as well, while it is being read."""
        if path not in self._read:
            self._read[path] = self._thread.submit(self._adapters.digest, path)
        if not self._read[path].done():
            raise CheckpointError(f"adapter {path} is being read", reason="identifying")
        if self._read[path].exception() is not None:
            self._read.pop(path).result()
        # Read already: this only looks whether its files are still the same.
        return self._adapters.digest(path)


class Adapters:
    """Digests of LoRA adapters, read once for each path."""

    _FILES = ("adapter_config.json", "adapter_model.safetensors")

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[int, ...], ...], bytes]] = {}

    def digest(self, path: str) -> bytes:
        """Digest of an adapter's files.

        Raises CheckpointError: "lora" when they cannot be read, "lora_changed" when they are
        no longer those of the first time: which of the two the engine runs, nobody can say.
        """
        files = [Path(path) / name for name in self._FILES]
        try:
            stats = [file.stat() for file in files]
            signature = tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)
            if path not in self._known:
                parts = [digest("cornplug-adapter-file-v1", file.read_bytes()) for file in files]
                self._known[path] = signature, digest("cornplug-adapter-v1", *parts)
        except OSError as e:
            raise CheckpointError(
                f"adapter {path}: cannot read {e.filename}: {e.strerror}", reason="lora"
            ) from e
        known, found = self._known[path]
        if known != signature:
            raise CheckpointError(f"adapter {path} was changed under the engine", reason="lora_changed")
        return found
