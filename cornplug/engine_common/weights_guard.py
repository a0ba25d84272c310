"""Whether an engine's weights are a known checkpoint's. While they are not, the engine shares nothing.

A checkpoint on disk identifies an engine's weights until a caller replaces them in place (sleep, reload, an
RL update). Weights that came over the wire cannot be fingerprinted, so sharing ends in all processes of the
engine until it restarts: reason "weights_updated". Weights that were read from another checkpoint begin a new
epoch, in which the engine shares under that checkpoint's identity; so do weights that a trainer named, where
`engine.trust_weight_version` says that such a name is of one state of the weights alone.
"""

from __future__ import annotations

import logging

from cornplug.engine_common import engine_state

_UNNAMED = "default"
"""Both engines' version of weights that no trainer has named."""


def replaced() -> bool:
    """Whether the weights may not be the checkpoint's, whichever process of the engine learned it."""
    return engine_state.current().replaced()


def epoch() -> int:
    """The number of this engine's weights: another after each update (`EngineState.epoch`)."""
    return engine_state.current().epoch()


def begin_update(by: str, log: logging.Logger) -> int:
    """The epoch in which the call `by` replaces the weights by those of a checkpoint: no process shares."""
    if not replaced():
        log.info("cornplug: %s is replacing the weights; nothing is shared until it finishes", by)
    return engine_state.current().begin_update()


def note_replaced(by: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine. `by` names the call that replaces the weights."""
    end_sharing(f"weights replaced by {by}", log)


def end_sharing(why: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine; the first call logs why."""
    state = engine_state.current()
    if not state.unknown():
        log.warning("cornplug: %s; this engine shares nothing until restart", why)
    state.note_replaced()


def unusable_version(version: object, before: object) -> str:
    """The reason why a trainer's version may not name the weights that it updated; "" if it may.

    `before` is the engine's version until then.
    """
    if not isinstance(version, str) or not version.strip():
        return "the update had no weight_version"
    if version == _UNNAMED:
        return f"{_UNNAMED!r} is the default weight_version"
    if version == before:
        return f"weight_version {version!r} did not change with the weights"
    if len(version.encode("utf-8", errors="surrogatepass")) > engine_state.LONGEST_VERSION_BYTES:
        return "the weight_version is too long"
    return ""
