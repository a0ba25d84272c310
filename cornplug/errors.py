"""The errors that callers of cornplug meet, in one tree. (Signals inside a module are not among them.)

    CornplugError
    ├── ConfigError            a setting is wrong: names the field and the remedy
    │   └── SocketTaken        another process serves the socket's path
    ├── CheckpointError        a checkpoint cannot be read or is of no known family
    ├── MediaError             an image or sound cannot be decoded, or is refused
    ├── CodecError             bytes do not match their envelope
    ├── LayoutError            an engine's KV cache does not map to pages
    ├── PlanInfeasible         no plan meets the SLOs with this pool: names the shortage
    ├── ProtocolError          another process sent bytes that are no frame or message of the protocol
    ├── PlanUnfinished         the solver's time was up before it had found any plan
    ├── ProcessFailed          a process that cornplug started has ended, or was not ready in time
    ├── StoreError
    │   └── StoreUnavailable   no answer inside the deadline, or no daemon at all
    └── EncoderError
        ├── EncoderUnavailable no answer inside the deadline, or no service at all
        ├── EncoderRefused     the service answered that it will not do this
        └── ReplicaLost        inside the service: the process that computed has ended

Connectors catch `CornplugError` where they call the store or the encoder service, and count a miss with its
`reason`: none reaches an engine.
"""

from __future__ import annotations

from pathlib import Path


class CornplugError(Exception):
    """Root of the tree.

    `reason` is a short snake_case word, fit for a metric label: the same word
    appears in `cornplug_misses_total{reason=...}`.
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


class SocketTaken(ConfigError):
    """Another process serves at the path of this setting."""

    def __init__(self, setting: str, path: Path) -> None:
        super().__init__(setting, f"another process serves {path}", "Stop it, or name another path.")


class CheckpointError(CornplugError):
    """A checkpoint cannot be read, or belongs to no family we know."""


class MediaError(CornplugError):
    """A medium cannot be decoded, or exceeds a limit."""


class CodecError(CornplugError):
    """Bytes do not agree with their envelope (magic, version, shape or checksum)."""

    @property
    def is_damage(self) -> bool:
        """False for an entry of another release, which is whole: a miss here, and never deleted."""
        return self.reason != "version"


class LayoutError(CornplugError):
    """An engine's KV cache does not map to engine-neutral pages."""


class PlanInfeasible(CornplugError):
    """No plan meets the SLOs with this pool. The message names the constraint and how much is lacking."""


class ProtocolError(CornplugError):
    """Another process sent bytes that are no frame or no message of the protocol."""


class PlanUnfinished(CornplugError):
    """The time limit came before the first plan, and before a proof that there is none."""


class ProcessFailed(CornplugError):
    """A started process has ended, or was not ready in time. The message holds the end of its log."""


class StoreError(CornplugError):
    """The store refused an operation."""


class StoreUnavailable(StoreError):
    """The store gave no answer inside the deadline (`reason` "store_timeout"), was not asked as it
    has been slow ("store_slow"), or there is none ("store_down")."""


class EncoderError(CornplugError):
    """Root of the encoder client's errors."""


class EncoderUnavailable(EncoderError):
    """No answer inside the deadline ("encoder_timeout") or no service ("encoder_down")."""


class EncoderRefused(EncoderError):
    """The service answered, and will not: unknown model, bad input, too late."""

    def __init__(self, message: str, *, reason: str = "error", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s
        """When asking again may do, where that is known."""


class ReplicaLost(EncoderError):
    """The process of the service that was to compute this has ended ("replica_lost")."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="replica_lost")
