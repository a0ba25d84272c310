"""Public exceptions of cornplug.

    CornplugError
    ├── ConfigError            a setting is wrong (names the field and the remedy)
    │   └── SocketInUse        another process is listening on the socket
    ├── CheckpointError        a checkpoint cannot be read or belongs to an unknown family
    ├── MediaError             a medium cannot be decoded or is rejected
    ├── CodecError             bytes do not match their header
    ├── LayoutError            an engine's KV cache cannot be mapped to pages
    ├── PlanInfeasible         no plan meets the SLOs with this pool (names the shortage)
    ├── ProtocolError          another process sent a malformed frame or message
    ├── PlanUnfinished         the solver reached its time limit before it found a plan
    ├── ProcessFailed          a child process ended or was not ready in time
    ├── StoreError
    │   └── StoreUnavailable   the store did not reply in time or is not running
    └── EncoderError
        ├── EncoderUnavailable the encoder service did not reply in time or is not running
        ├── EncoderRefused     the encoder service rejected the request
        └── ReplicaLost        the replica that computed the request ended (inside the service)

Connectors catch `CornplugError` around calls to the store and the encoder service, and count a miss with the
error's `reason`. These exceptions never reach the engine.
"""

from __future__ import annotations

from pathlib import Path


class CornplugError(Exception):
    """Base class of all exceptions of cornplug.

    `reason` is a short snake_case identifier, which is also the label value in
    `cornplug_misses_total{reason=...}`.
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(CornplugError):
    """A setting is wrong. The message names the field and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}", reason="config")
        self.field = field
        self.remedy = remedy


class SocketInUse(ConfigError):
    """Another process is listening on the path in this setting."""

    def __init__(self, setting: str, path: Path) -> None:
        super().__init__(
            setting, f"another process is listening on {path}", "Stop that process, or use another path."
        )


class CheckpointError(CornplugError):
    """A checkpoint cannot be read, or belongs to an unknown family."""


class MediaError(CornplugError):
    """A medium cannot be decoded, or exceeds a limit."""


class CodecError(CornplugError):
    """Bytes do not match their header (magic, version, shape or checksum)."""

    @property
    def is_damage(self) -> bool:
        """Whether the entry is damaged and should be deleted. False if another release wrote the entry."""
        return self.reason != "version"


class LayoutError(CornplugError):
    """An engine's KV cache cannot be mapped to engine-neutral pages."""


class PlanInfeasible(CornplugError):
    """No plan meets the SLOs with this pool. The message names the constraint and the shortage."""


class ProtocolError(CornplugError):
    """Another process sent a malformed frame or message."""


class PlanUnfinished(CornplugError):
    """The solver reached its time limit before it found a plan or proved that there is none."""


class ProcessFailed(CornplugError):
    """A child process ended, or was not ready in time. The message contains the end of its log."""


class StoreError(CornplugError):
    """The store rejected an operation."""


class StoreUnavailable(StoreError):
    """The store cannot be used.

    `reason` is "store_timeout" if the store did not reply within the deadline, "store_slow" if no request was
    sent because the store has been slow, and "store_down" if the store is not running.
    """


class EncoderError(CornplugError):
    """Base class of errors of the encoder clients."""


class EncoderUnavailable(EncoderError):
    """The encoder service did not reply in time ("encoder_timeout") or is not running ("encoder_down")."""


class EncoderRefused(EncoderError):
    """The encoder service rejected the request, for example because of an unknown model or invalid input."""

    def __init__(self, message: str, *, reason: str = "error", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s
        """Seconds after which a retry can succeed, or None if the service sent no time."""


class ReplicaLost(EncoderError):
    """The replica that computed this request ended ("replica_lost")."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="replica_lost")
