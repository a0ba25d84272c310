"""Stands for an engine in tests of changes under load: at SIGTERM it ends the requests under way first.

Serves /health at --port, with the number of requests under way, and any POST after FAKE_REQUEST_S (0.2),
with its model and port. FAKE_ENDS: a file; a server whose model is its text ends at once with status 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

MODEL = sys.argv[2]
PORT = int(sys.argv[sys.argv.index("--port") + 1])
UNDER_WAY: list[str] = []


class Completions(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"under_way": len(UNDER_WAY)}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        UNDER_WAY.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(float(os.environ.get("FAKE_REQUEST_S", "0.2")))
        UNDER_WAY.pop()
        self._answer({"model": MODEL, "port": PORT, "pid": os.getpid()}, 200)

    def _answer(self, body: dict[str, object], status: int) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False


def main() -> None:
    ends = Path(os.environ.get("FAKE_ENDS", "/nonexistent"))
    if ends.exists() and ends.read_text() == MODEL:
        print("no memory for the weights", flush=True)
        sys.exit(3)
    server = Server(("127.0.0.1", PORT), Completions)

    def end(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    server.serve_forever()
    server.server_close()  # waits for the threads of requests under way


main()
