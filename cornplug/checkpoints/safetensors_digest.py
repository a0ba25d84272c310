"""Reads untrusted safetensors files: headers of limited size, and digests of the tensors' raw bytes.

The complete header is checked before any data is read. Names, dtypes, shapes and offsets must be consistent
with each other and with the file's size. Digests are cached per file in
`private_paths.cache_dir()/"fingerprints"`, so that a checkpoint is read once per host.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cornplug.errors import CheckpointError
from cornplug.identity import tensors_fingerprint
from cornplug.private_paths import cache_dir

_log = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 32 << 20
"""Maximum size of a header, enough for about 250,000 tensors."""
_PIECE_BYTES: Final = 8 << 20
_SHOW_PROGRESS_BYTES: Final = 2 << 30
_HASH_THREADS: Final = min(4, os.cpu_count() or 1)
_MIN_STABLE_AGE_S: Final = 2.0
"""Age of a file in seconds. A younger file can change without a change of its timestamps."""

_DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _HeaderRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Natural, _Natural]


class TensorEntry(msgspec.Struct, frozen=True):
    """Location of one tensor in a safetensors file, with its dtype (safetensors' name) and shape."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset in bytes from the start of the file."""
    size_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file and return its tensors.

    Raises CheckpointError("bad_header") unless length, names, shapes and offsets are consistent and the
    tensors fill the file without gap or overlap.
    """
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise _bad_header_error(path, f"header of {length} bytes in a file of {size} bytes")
            text = f.read(length)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}.", reason="unreadable") from e
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        rows = {name: msgspec.json.decode(row, type=_HeaderRow) for name, row in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _bad_header_error(path, str(e)) from e
    return _validate_rows(path, rows, start=8 + length, size=size)


def _validate_rows(
    path: Path, rows: Mapping[str, _HeaderRow], *, start: int, size: int
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    at = 0
    for name, row in sorted(rows.items(), key=lambda item: item[1].data_offsets):
        begin, end = row.data_offsets
        bits = _DTYPE_BITS.get(row.dtype)
        if bits is None:
            raise _bad_header_error(path, f"tensor {name!r} has unknown dtype {row.dtype!r}")
        if begin != at or (end - begin) * 8 != math.prod(row.shape) * bits:
            raise _bad_header_error(
                path, f"tensor {name!r} at [{begin}, {end}), shape {row.shape}, does not follow {at}"
            )
        entries[name] = TensorEntry(row.dtype, row.shape, start + begin, end - begin)
        at = end
    if start + at != size:
        raise _bad_header_error(path, f"tensors end at byte {start + at} of {size}")
    return entries


def _bad_header_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {problem}. Download it again.", reason="bad_header")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files that engines load from a checkpoint folder, sorted by name.

    Raises CheckpointError: "missing_shard" if a file in the index is missing, "not_safetensors" if the folder
    contains only other formats, "no_weights" if it contains no weights, or "bad_header" if the index is
    invalid.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise _bad_header_error(index, str(e)) from e
        for name in names:
            if Path(name).name != name:
                raise _bad_header_error(index, f"{name!r} is not a file name")
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} does not contain {name}, which is in its index. Complete the download.",
                    reason="missing_shard",
                )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if found:
        return found
    if any(folder.glob("adapter_*.safetensors")):
        raise CheckpointError(
            f"{folder} contains only a LoRA adapter. Use the base model, or merge the adapter.",
            reason="no_weights",
        )
    if any(p for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has no safetensors weights, and other formats are not supported. "
            "To convert it, load it with transformers and call save_pretrained(safe_serialization=True).",
            reason="not_safetensors",
        )
    raise CheckpointError(f"{folder} contains no weights. Complete the download.", reason="no_weights")


def tensor_digests(entries_by_file: Mapping[Path, Mapping[str, TensorEntry]]) -> dict[Path, dict[str, bytes]]:
    """Return the SHA-256 of the raw bytes of each wanted tensor, by file and name.

    Only tensors whose digests are not cached are read. Raises CheckpointError("unreadable") if a file cannot
    be read, and CheckpointError("changed") if it changes while it is read.
    """
    return {path: _file_digests(path, entries) for path, entries in entries_by_file.items()}


def folder_fingerprint(folder: Path) -> bytes:
    """Return the fingerprint of all tensors in a folder under their published names, for any model.

    Raises CheckpointError("duplicate_tensor"), and the same errors as `tensor_files`, `read_header` and
    `tensor_digests`.
    """
    wanted = {path: read_header(path) for path in tensor_files(folder)}
    digests = tensor_digests(wanted)
    try:
        return tensors_fingerprint(
            (name, entry.dtype, entry.shape, digests[path][name])
            for path, entries in wanted.items()
            for name, entry in entries.items()
        )
    except ValueError as e:
        raise CheckpointError(f"{folder}: {e}. Remove stray weight files.", reason="duplicate_tensor") from e


def _file_digests(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, bytes]:
    identity, settled = _file_identity(path)
    slot = cache_dir() / "fingerprints" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    with _lock_cache(slot):
        known = _load_cache(slot, identity)
        missing = {name: entry for name, entry in entries.items() if name not in known}
        if missing:
            with _show_progress(path.name, sum(entry.size_bytes for entry in missing.values())) as advance:
                known |= _hash_tensors(path, missing, advance)
            if _file_identity(path)[0] != identity:
                raise CheckpointError(f"{path} changed while it was read. Try again.", reason="changed")
            if settled:
                _save_cache(slot, identity, known)
    return {name: known[name] for name in entries}


@contextmanager
def _show_progress(name: str, size_bytes: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr while a large file is read."""
    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hide = size_bytes < _SHOW_PROGRESS_BYTES
    with Progress(*columns, console=Console(file=sys.stderr), disable=hide, transient=True) as progress:
        task = progress.add_task(name, total=size_bytes)
        yield lambda read_bytes: progress.advance(task, read_bytes)


def _file_identity(path: Path) -> tuple[str, bool]:
    """Return an identifier of a file's content, and whether digests can be cached under it.

    A file in the Hugging Face cache is named by its own SHA-256. For other files, the identifier consists of
    path, size, timestamps and inode. Digests of very new files are not cached, because another write could
    leave the identifier unchanged.
    """
    try:
        real = path.resolve(strict=True)
        stat = real.stat()
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}.", reason="unreadable") from e
    if real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name):
        return f"sha256:{real.name}:{stat.st_size}", True
    newest = max(stat.st_mtime_ns, stat.st_ctime_ns)
    identity = f"file:{real}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"
    return identity, time.time_ns() - newest > _MIN_STABLE_AGE_S * 1e9


def _hash_tensors(
    path: Path, entries: Mapping[str, TensorEntry], advance: Callable[[float], None]
) -> dict[str, bytes]:
    def one(name: str) -> bytes:
        entry, h, done = entries[name], hashlib.sha256(), 0
        buffer = bytearray(min(_PIECE_BYTES, entry.size_bytes))
        while done < entry.size_bytes:
            piece = memoryview(buffer)[: entry.size_bytes - done]
            got = os.preadv(file, [piece], entry.offset + done)
            if got == 0:
                raise CheckpointError(f"{path} ended inside {name!r}. Try again.", reason="changed")
            h.update(piece[:got])
            done += got
            advance(got)
        return h.digest()

    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}.", reason="unreadable") from e
    try:
        # hashlib and preadv release the GIL, so threads hash in parallel.
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            return dict(zip(entries, pool.map(one, entries), strict=True))
    finally:
        os.close(file)


class _DigestCache(msgspec.Struct):
    identity: str
    sha256: dict[str, str]


def _load_cache(cache_file: Path, identity: str) -> dict[str, bytes]:
    try:
        cached = msgspec.json.decode(cache_file.read_bytes(), type=_DigestCache)
        digests = {name: bytes.fromhex(text) for name, text in cached.sha256.items()}
    except (OSError, ValueError):  # The cache file is missing or damaged. msgspec's errors are ValueErrors.
        return {}
    if cached.identity != identity or any(len(d) != 32 for d in digests.values()):
        return {}
    return digests


def _save_cache(cache_file: Path, identity: str, digests: Mapping[str, bytes]) -> None:
    body = msgspec.json.encode(_DigestCache(identity, {name: d.hex() for name, d in digests.items()}))
    try:
        with tempfile.NamedTemporaryFile(dir=cache_file.parent, prefix=".new-", delete=False) as f:
            f.write(body)
        os.replace(f.name, cache_file)
    except OSError as e:
        _log.warning("cannot cache fingerprints, so the next start will compute them again: %s", e)


@contextmanager
def _lock_cache(cache_file: Path) -> Iterator[None]:
    """Allow only one process at a time to compute a file's digests, so that other processes can use the
    cached digests."""
    with ExitStack() as held:
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = held.enter_context(cache_file.with_suffix(".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:
            # If the home folder is read-only, the next process computes the digests again. This is not an
            # error.
            _log.warning("cannot use the fingerprint cache in %s: %s", cache_file.parent, e)
        yield
