"""The identity of an engine's model, read on a thread: a checkpoint's first fingerprint takes minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, Literal, TypeVar

from cornplug.engine_common import engine_state, weights_guard
from cornplug.errors import CheckpointError

T = TypeVar("T")

FIRST_WAIT_S: Final = 2.0
"""Longest that all callers together wait for a checkpoint that was never fingerprinted before."""
_NOT_SHARED: Final = {
    "KV": "cornplug: KV of this engine is not shared: %s",
    "embeddings": "cornplug: embeddings of this engine are not shared: %s",
}


class BackgroundIdentity(Generic[T]):
    """Begins to identify a model when it is made. Thread-safe.

    Args:
        identify: returns the identity. Raises CheckpointError if the model cannot be identified.
        shared: the kind of entries that need the identity.
        log: the logger's method for the line that says why the model cannot be identified.
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
        """None until the model is identified, and if it cannot be."""
        threading.Thread(target=self._run, name="cornplug-identify", daemon=True).start()

    @property
    def failure(self) -> str:
        """The reason why the model cannot be identified; "" while that is not known."""
        return self._failed.reason if self._failed is not None else ""

    def get(self) -> T:
        """The identity. Raises CheckpointError: "identifying" until `identify` returns, then the error that
        it raised, "identity_error" for an error of another class.
        """
        if self.found is not None:
            return self.found
        raise self._failed or CheckpointError("the checkpoint is still being read", reason="identifying")

    def wait(self, timeout_s: float) -> bool:
        """Whether the reading ended, well or not, within that time."""
        return self._ended.wait(timeout_s)

    def first_wait(self) -> bool:
        """`wait` for the rest of `FIRST_WAIT_S`."""
        return self.wait(self.first_wait_s())

    def first_wait_s(self) -> float:
        """Seconds left of `FIRST_WAIT_S`, which begin with the first call; 0 once the reading ended."""
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
    """The identity of the weights that an engine holds now, begun anew after each update. Thread-safe.

    Arguments as `BackgroundIdentity`'s.
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
        """(epoch, identity of its weights). While weights are replaced: those before."""
        epoch = weights_guard.epoch()
        if epoch != self._at[0] and not epoch & 1:
            with self._lock:
                if epoch != self._at[0]:
                    self._at = self._begin(epoch)
        return self._at

    def get(self) -> tuple[int, T]:
        """(epoch, identity of its weights). Raises as `BackgroundIdentity.get`; "weights_updated" while
        weights are replaced, and where no checkpoint is known to hold them."""
        epoch, identity = self.now()
        found = identity.get()
        if weights_guard.replaced() or weights_guard.epoch() != epoch:
            raise _updated()
        return epoch, found

    def _begin(self, epoch: int) -> tuple[int, BackgroundIdentity[T]]:
        def identify() -> T:
            found = self._identify()
            source = engine_state.current().source()
            # `identify` may have read of a later epoch. A start-up that shares nothing has no source.
            if epoch and (source is None or source.epoch != epoch):
                raise _updated()
            return found

        return epoch, BackgroundIdentity(identify, self._shared, self._log)


def _updated() -> CheckpointError:
    return CheckpointError("the weights were replaced", reason="weights_updated")
