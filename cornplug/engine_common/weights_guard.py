"""Whether an engine's weights are still the checkpoint's. Once they are not, the engine shares nothing.

A checkpoint on disk identifies an engine's weights until a caller replaces them in place (sleep, reload, an
RL update). Weights that came over the wire cannot be fingerprinted, so sharing ends in all processes of the
engine until it restarts: reason "weights_updated".
"""

from __future__ import annotations

import logging

from cornplug.engine_common import engine_state


def replaced() -> bool:
    """Whether the weights may not be the checkpoint's, whichever process of the engine learned it."""
    return engine_state.current().replaced()


def note_replaced(by: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine. `by` names the call that replaces the weights."""
    end_sharing(f"weights replaced by {by}", log)


def end_sharing(why: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine; the first call logs why."""
    state = engine_state.current()
    if not state.replaced():
        log.warning("cornplug: %s; this engine shares nothing until restart", why)
    state.note_replaced()
