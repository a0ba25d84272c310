"""Identifies the weights that an engine runs. While they cannot be identified, the engine shares nothing.

A checkpoint on disk identifies an engine's weights until they are replaced in place (sleep, reload, an RL
update). Weights that were sent over the network cannot be fingerprinted. In this case, sharing ends in all
processes of the engine until it restarts (reason "weights_updated"). Weights from another checkpoint begin a
new epoch, in which the engine shares under that checkpoint's identity. Weights with a trainer's version also
begin a new epoch, if `engine.trust_weight_version` is set. The setting promises that a trainer never uses one
version for different weights.

The model is identified on a background thread, because the first fingerprint of a checkpoint takes minutes.
Files may change after the engine has read them and before they are fingerprinted. Therefore, when a model is
loaded, small tensors that are neither split across ranks nor quantised (norms) are compared with the files.
This detects a folder that was rewritten in between, and a loader that reads other files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.checkpoints.families import FAMILIES
from cornplug.engine_common import engine_state
from cornplug.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_DEFAULT_VERSION = "default"
"""Weight version that both engines use if the trainer sets none."""

T = TypeVar("T")
INITIAL_WAIT_S: Final = 2.0
"""Maximum seconds that all callers together wait for a checkpoint whose fingerprint is not cached."""
_NOT_SHARED_MESSAGES: Final = {
    "KV": "cornplug: KV of this engine is not shared: %s",
    "embeddings": "cornplug: embeddings of this engine are not shared: %s",
}
_MAX_NORM_BYTES: Final = 1 << 20
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def has_replaced_weights() -> bool:
    """Return whether the engine's weights may differ from the identified checkpoint. Any process of the
    engine can record this."""
    return engine_state.current().has_replaced_weights()


def epoch() -> int:
    """Return the epoch of this engine's weights: a counter of weight updates (`EngineState.epoch`)."""
    return engine_state.current().epoch()


def begin_update(call_name: str, log: logging.Logger) -> int:
    """Begin an epoch in which the call named `call_name` replaces the engine's weights, and return the epoch.
    No process of the engine shares until the update ends."""
    if not has_replaced_weights():
        log.info(
            "cornplug: %s is replacing the weights; this engine shares nothing until it finishes", call_name
        )
    return engine_state.current().begin_update()


def record_replacement(call_name: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine, because the call named `call_name` replaces its
    weights."""
    end_sharing(f"weights replaced by {call_name}", log)


def end_sharing(why: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine until it restarts. The first call logs the reason `why`."""
    state = engine_state.current()
    if not state.has_unknown_weights():
        log.warning("cornplug: %s; this engine shares nothing until restart", why)
    state.mark_weights_unknown()


def version_problem(version: object, previous: object) -> str:
    """Return the reason why a trainer's weight version cannot identify the updated weights, or "" if it can.

    `previous` is the engine's weight version before the update.
    """
    if not isinstance(version, str) or not version.strip():
        return "the update had no weight_version"
    if version == _DEFAULT_VERSION:
        return f"{_DEFAULT_VERSION!r} is the default weight_version"
    if version == previous:
        return f"weight_version {version!r} did not change with the weights"
    if len(version.encode("utf-8", errors="surrogatepass")) > engine_state.MAX_VERSION_BYTES:
        return "the weight_version is too long"
    return ""


class BackgroundIdentity(Generic[T]):
    """Identifies a model on a background thread, which starts at construction. Thread-safe.

    Args:
        identify: returns the model's identity. Raises CheckpointError if the model cannot be identified.
        kind: kind of entries whose keys need the identity, for the log.
        log: logger method that logs the reason if the model cannot be identified.
    """

    def __init__(
        self,
        identify: Callable[[], T],
        kind: Literal["KV", "embeddings"],
        log: Callable[[str, object], None],
    ) -> None:
        self._identify = identify
        self._error: CheckpointError | None = None
        self._log, self._message = log, _NOT_SHARED_MESSAGES[kind]
        self._finished = threading.Event()
        self._wait_end_s: float | None = None
        self.value: T | None = None
        """Identity of the model, or None if it is not identified yet or cannot be identified."""
        threading.Thread(target=self._run, name="cornplug-identify", daemon=True).start()

    @property
    def failure(self) -> str:
        """Reason why the model cannot be identified, or "" if identification has not failed."""
        return self._error.reason if self._error is not None else ""

    def get(self) -> T:
        """Return the model's identity. Raises CheckpointError: "identifying" until `identify` returns, then
        the error that `identify` raised. Any other exception from `identify` becomes "identity_error"."""
        if self.value is not None:
            return self.value
        raise self._error or CheckpointError("the checkpoint is still being read", reason="identifying")

    def wait(self, timeout_s: float) -> bool:
        """Wait until `identify` has finished, and return whether it did within the timeout."""
        return self._finished.wait(timeout_s)

    def wait_initially(self) -> bool:
        """Wait for `identify` for the rest of `INITIAL_WAIT_S`, and return whether it has finished."""
        return self.wait(self.initial_wait_s())

    def initial_wait_s(self) -> float:
        """Return the rest of `INITIAL_WAIT_S` in seconds, counted from the first call. Return 0 if `identify`
        has finished."""
        now = time.monotonic()
        if self._wait_end_s is None:
            self._wait_end_s = now + INITIAL_WAIT_S
        return 0.0 if self._finished.is_set() else max(0.0, self._wait_end_s - now)

    def _run(self) -> None:
        failed = CheckpointError("the model could not be identified", reason="identity_error")
        try:
            self.value = self._identify()
        except CheckpointError as e:
            failed = e
            self._log(self._message, e)
        finally:
            if self.value is None:
                self._error = failed
            self._finished.set()


class CurrentIdentity(Generic[T]):
    """Identity of the weights that an engine currently runs. It is computed again after each weight update.
    Thread-safe.

    Takes the same arguments as `BackgroundIdentity`.
    """

    def __init__(
        self,
        identify: Callable[[], T],
        kind: Literal["KV", "embeddings"],
        log: Callable[[str, object], None],
    ) -> None:
        self._identify, self._kind, self._log = identify, kind, log
        self._lock = threading.Lock()
        self._current = self._start_identifying(epoch())

    def current(self) -> tuple[int, BackgroundIdentity[T]]:
        """Return (epoch of the weights, identity of the model with these weights). During an update, return
        the values of the previous epoch."""
        current = epoch()
        if current != self._current[0] and not current & 1:
            with self._lock:
                if current != self._current[0]:
                    self._current = self._start_identifying(current)
        return self._current

    def get(self) -> tuple[int, T]:
        """Return (epoch of the weights, identity of the model with these weights).

        Raises the same errors as `BackgroundIdentity.get`, and CheckpointError("weights_updated") during an
        update or if the source of the weights is unknown."""
        current, identity = self.current()
        found = identity.get()
        if has_replaced_weights() or epoch() != current:
            raise _updated_error()
        return current, found

    def _start_identifying(self, current: int) -> tuple[int, BackgroundIdentity[T]]:
        def identify() -> T:
            found = self._identify()
            source = engine_state.current().source()
            # `identify` may have read the weights of a later epoch. In epoch 0, a process that cannot read
            # the shared state has no weight source.
            if current and (source is None or source.epoch != current):
                raise _updated_error()
            return found

        return current, BackgroundIdentity(identify, self._kind, self._log)


def _updated_error() -> CheckpointError:
    return CheckpointError("the weights were replaced", reason="weights_updated")


def check_loaded_weights(
    model: torch.nn.Module, get_checkpoint: Callable[[], Checkpoint], log: logging.Logger
) -> None:
    """End sharing in all processes of this engine if the loaded weights differ from the checkpoint's files.

    `get_checkpoint` returns the model's checkpoint. If it raises CheckpointError, nothing is compared,
    because the engine shares nothing anyway.
    """
    try:
        checkpoint = get_checkpoint()
        name, compared = find_difference(model, checkpoint)
    except CheckpointError as e:
        log.debug("cornplug: did not compare loaded weights: %s", e)
        return
    if name is not None:
        end_sharing(f"{name} in memory differs from {checkpoint.path}", log)
    else:
        log.debug("cornplug: %d tensors in memory match the files", compared)


def find_difference(model: torch.nn.Module, checkpoint: Checkpoint) -> tuple[str | None, int]:
    """Return (name of the first norm in memory that differs from its file, number of compared tensors). The
    name is None if all norms match.

    A tensor from the files is compared if its name is the suffix of exactly one parameter's name and both
    shapes are equal. Raises CheckpointError.
    """
    import torch

    by_end: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for start in range(len(parts)):
            by_end.setdefault(".".join(parts[start:]), []).append(parameter)
    compared = 0
    for name, file, entry in _iter_norms(checkpoint):
        found = by_end.get(name, [])
        if len(found) != 1 or tuple(found[0].shape) != tuple(entry.shape) or found[0].is_meta:
            continue
        compared += 1
        here = found[0].detach().cpu()
        if not torch.equal(_read_tensor(file, entry).to(here.dtype), here):
            return name, compared
    return None, compared


def _iter_norms(checkpoint: Checkpoint) -> Iterator[tuple[str, Path, Any]]:
    known = str(checkpoint.config.get("model_type")) in FAMILIES
    parts: tuple[Part, ...] = ("language_model", "tower") if known else ("language_model",)
    for part in parts:
        for name, file, entry in checkpoint.tensors(part):
            small = len(entry.shape) == 1 and entry.size_bytes <= _MAX_NORM_BYTES
            if small and "norm" in name and name.endswith(".weight") and entry.dtype in _DTYPES:
                yield name, file, entry


def _read_tensor(file: Path, entry: Any) -> torch.Tensor:
    import torch

    try:
        with file.open("rb") as f:
            f.seek(entry.offset)
            data = bytearray(f.read(entry.size_bytes))
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}.", reason="unreadable") from e
    return torch.frombuffer(data, dtype=getattr(torch, _DTYPES[entry.dtype]))
