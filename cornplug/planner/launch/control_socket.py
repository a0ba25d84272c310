"""Socket through which `cornplug launch --apply` sends a plan to the running launcher.

The socket also prevents a second launcher from running in the same run folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cornplug.errors import ConfigError, CornplugError
from cornplug.local_socket import SocketClaim, foreign_user, frame, receive_frame
from cornplug.planner.plan import Plan

NAME: Final = "launch.sock"
_LIMIT: Final = 256 << 20
_READ_S: Final = 10.0

Apply = Callable[[Plan], None]
Tell = Callable[[str], None]


class ControlSocket:
    """Socket on which a launcher accepts new plans, one at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._claim = SocketClaim(run_dir / NAME, setting="--run-dir")
        self._claim.listener.setblocking(False)
        self._peer: socket.socket | None = None

    def poll(self, apply: Apply) -> None:
        """If a caller has connected, apply its plan and send the result. Returns immediately otherwise."""
        try:
            peer, _ = self._claim.listener.accept()
        except BlockingIOError:
            return
        with peer:
            peer.settimeout(_READ_S)
            try:
                if foreign_user(peer) is not None:
                    return
                plan = Plan.model_validate_json(receive_frame(peer, limit=_LIMIT))
            except (OSError, CornplugError, ValidationError):
                return  # The caller detects that the connection was closed.
            self._peer = peer
            try:
                apply(plan)
                self._send({"status": 0})
            except CornplugError as e:
                self._send({"status": 1, "error": str(e)})
            finally:
                self._peer = None

    def tell(self, text: str) -> None:
        """Send a line about the progress to the caller whose plan is being applied, if there is one."""
        self._send({"text": text})

    def close(self) -> None:
        """Close the socket, so that another launcher can run in the folder."""
        self._claim.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message. Errors are ignored, because the plan is applied even if the caller has
        disconnected."""
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.sendall(frame(json.dumps(message).encode(), limit=_LIMIT))


@contextmanager
def control_socket(run_dir: Path) -> Iterator[ControlSocket]:
    """Open the socket of a launcher. Raises SocketTaken if another launcher runs in the folder."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = ControlSocket(run_dir)
    try:
        yield made
    finally:
        made.close()


def ask(run_dir: Path, plan: Plan, tell: Tell) -> str | None:
    """Send a plan to the launcher that runs in a folder, and return the launcher's error, or None.

    `tell` is called with each line about the progress. Raises ConfigError if no launcher runs in the folder.
    """
    path = run_dir / NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError as e:
            raise ConfigError(
                "--apply",
                f"no launcher responds at {path} ({e.strerror})",
                "Start the first plan with `cornplug launch`, or set its folder with --run-dir.",
            ) from e
        if foreign_user(sock) is not None:
            raise ConfigError("--run-dir", f"{path} belongs to another user", "Use a folder of your own.")
        sock.sendall(frame(plan.model_dump_json().encode(), limit=_LIMIT))
        while True:
            try:
                message = json.loads(receive_frame(sock, limit=_LIMIT))
            except OSError:
                return "the launcher stopped, or rejected the plan; see its output"
            if "status" in message:
                return message.get("error") if message["status"] else None
            tell(message["text"])
