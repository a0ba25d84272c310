"""Tracks whether an engine's weights can be identified. While they cannot, the engine shares nothing.

A checkpoint on disk identifies an engine's weights until a caller replaces them in place (sleep, reload, an
RL update). Weights that were sent over the network cannot be fingerprinted, so sharing ends in all processes
of the engine until it restarts (reason "weights_updated"). Weights from another checkpoint begin a new epoch,
in which the engine shares under that checkpoint's identity. Weights with a trainer's version also begin a new
epoch, if `engine.trust_weight_version` promises that a version is never used for different weights.
"""

from __future__ import annotations

import logging

from cornplug.engine_common import engine_state

_UNNAMED = "default"
"""Weight version that both engines use if the trainer sets none."""


def replaced() -> bool:
    """Return whether the engine's weights may differ from those of the identified checkpoint, as recorded by
    any process of the engine."""
    return engine_state.current().replaced()


def epoch() -> int:
    """Return the epoch of this engine's weights, which increases with each weight update
    (`EngineState.epoch`)."""
    return engine_state.current().epoch()


def begin_update(by: str, log: logging.Logger) -> int:
    """Begin an epoch in which the call named `by` replaces the engine's weights, and return the epoch. No
    process of the engine shares until the update ends."""
    if not replaced():
        log.info("cornplug: %s is replacing the weights; nothing is shared until it finishes", by)
    return engine_state.current().begin_update()


def note_replaced(by: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine, because the call named `by` replaces its weights."""
    end_sharing(f"weights replaced by {by}", log)


def end_sharing(why: str, log: logging.Logger) -> None:
    """End sharing in every process of this engine until it restarts. The first call logs the reason `why`."""
    state = engine_state.current()
    if not state.unknown():
        log.warning("cornplug: %s; this engine shares nothing until restart", why)
    state.note_replaced()


def unusable_version(version: object, before: object) -> str:
    """Return the reason why a trainer's weight version cannot identify the updated weights, or "" if it can.

    `before` is the engine's weight version before the update.
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
