"""A stand-in for a speech server: POST /v1/audio/speech gives a WAV with one tone for each letter."""

from __future__ import annotations

import argparse
import io
import json
import math
import struct
import wave
from http.server import BaseHTTPRequestHandler, HTTPServer

_RATE = 8000


class Speech(BaseHTTPRequestHandler):
    """OpenAI's address for speech, and /health."""

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, b"", "text/plain")

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        self._answer(200, tones(text), "audio/wav")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


def tones(text: str) -> bytes:
    """A WAV file of 50 ms for each letter."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        for letter in text:
            step = 2 * math.pi * (200 + ord(letter) % 64 * 10) / _RATE
            file.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(step * i))) for i in range(400)))
    return out.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    HTTPServer(("127.0.0.1", parser.parse_args().port), Speech).serve_forever()
