"""Computation of the identity of an engine's model on a background thread, because the first fingerprint of a
checkpoint takes minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, Literal, TypeVar

from cornplug.engine_common import engine_state, weights_guard
from cornplug.errors import CheckpointError

T = TypeVar("T")

FIRST_WAIT_S: Final = 2.0
"""Maximum seconds that all callers together wait for a checkpoint whose fingerprint is not cached."""
_NOT_SHARED: Final = {
    "KV": "cornplug: KV of this engine is not shared: %s",
    "embeddings": "cornplug: embeddings of this engine are not shared: %s",
}


class BackgroundIdentity(Generic[T]):
    """Identifies a model on a background thread, which starts at construction. Thread-safe.

    Args:
        identify: returns the model's identity. Raises CheckpointError if the model cannot be identified.
        shared: kind of entries whose keys need the identity, for the log.
        log: logger method that logs the reason if the model cannot be identified.
    """

    def __init__(
        self,
        identify: Callable[[], T],
        shared: Literal["KV", "embeddings"],
        log: Callable[[str, object], None],
    ) -> None:
        self._identify = identify
        self._failed: CheckpointError | None = None
        self._log, self._message = log, _NOT_SHARED[shared]
        self._ended = threading.Event()
        self._waits_until_s: float | None = None
        self.found: T | None = None
        """Identity of the model, or None if it is not identified yet or cannot be identified."""
        threading.Thread(target=self._run, name="cornplug-identify", daemon=True).start()

    @property
    def failure(self) -> str:
        """Reason why the model cannot be identified, or "" if identification has not failed."""
        return self._failed.reason if self._failed is not None else ""

    def get(self) -> T:
        """Return the model's identity. Raises CheckpointError: "identifying" until `identify` returns, then
        the error that `identify` raised. Any other exception from `identify` becomes "identity_error"."""
        if self.found is not None:
            return self.found
        raise self._failed or CheckpointError("the checkpoint is still being read", reason="identifying")

    def wait(self, timeout_s: float) -> bool:
        """Wait until `identify` has finished, and return whether it did within the timeout."""
        return self._ended.wait(timeout_s)

    def first_wait(self) -> bool:
        """Wait for `identify` for the rest of `FIRST_WAIT_S`, and return whether it has finished."""
        return self.wait(self.first_wait_s())

    def first_wait_s(self) -> float:
        """Return how many seconds of `FIRST_WAIT_S` are left since the first call, or 0 after `identify` has
        finished."""
        now = time.monotonic()
        if self._waits_until_s is None:
            self._waits_until_s = now + FIRST_WAIT_S
        return 0.0 if self._ended.is_set() else max(0.0, self._waits_until_s - now)

    def _run(self) -> None:
        failed = CheckpointError("the model could not be identified", reason="identity_error")
        try:
            self.found = self._identify()
        except CheckpointError as e:
            failed = e
            self._log(self._message, e)
        finally:
            if self.found is None:
                self._failed = failed
            self._ended.set()


class CurrentIdentity(Generic[T]):
    """Identity of the weights that an engine currently runs. The identity is computed again after each weight
    update. Thread-safe.

    The arguments are the same as for `BackgroundIdentity`.
    """

    def __init__(
        self,
        identify: Callable[[], T],
        shared: Literal["KV", "embeddings"],
        log: Callable[[str, object], None],
    ) -> None:
        self._identify, self._shared, self._log = identify, shared, log
        self._lock = threading.Lock()
        self._at = self._begin(weights_guard.epoch())

    def now(self) -> tuple[int, BackgroundIdentity[T]]:
        """Return (epoch of the weights, identity of the model with these weights). During an update, returns
        the values for the previous epoch."""
        epoch = weights_guard.epoch()
        if epoch != self._at[0] and not epoch & 1:
            with self._lock:
                if epoch != self._at[0]:
                    self._at = self._begin(epoch)
        return self._at

    def get(self) -> tuple[int, T]:
        """Return (epoch of the weights, identity of the model with these weights). Raises CheckpointError
        like `BackgroundIdentity.get`, and "weights_updated" during an update or if it is unknown which
        checkpoint contains the weights."""
        epoch, identity = self.now()
        found = identity.get()
        if weights_guard.replaced() or weights_guard.epoch() != epoch:
            raise _updated()
        return epoch, found

    def _begin(self, epoch: int) -> tuple[int, BackgroundIdentity[T]]:
        def identify() -> T:
            found = self._identify()
            source = engine_state.current().source()
            # `identify` may have read the weights of a later epoch. In epoch 0, a process without shared
            # state has no source.
            if epoch and (source is None or source.epoch != epoch):
                raise _updated()
            return found

        return epoch, BackgroundIdentity(identify, self._shared, self._log)


def _updated() -> CheckpointError:
    return CheckpointError("the weights were replaced", reason="weights_updated")
