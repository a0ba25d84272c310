"""Stands for an engine or a router in tests of starting and ending: serves /health at --port.

In the environment: FAKE_FAILS, to end at once; FAKE_EVENTS, a file to note the port of each end in.
"""

from __future__ import annotations

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("arguments:", *sys.argv[1:], flush=True)
    print("cores:", *sorted(os.sched_getaffinity(0)), flush=True)
    if "FAKE_FAILS" in os.environ:
        print("no memory for the weights", flush=True)
        sys.exit(3)

    def end(number: int, frame: FrameType | None) -> None:
        with Path(os.environ["FAKE_EVENTS"]).open("a") as events:
            events.write(f"{port}\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    HTTPServer(("127.0.0.1", port), Health).serve_forever()


main()
