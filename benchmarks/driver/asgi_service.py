"""The encoder service in this process, asked by ASGI without a socket, and the CPU that it uses."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

_BOUNDARY: Final = b"cornplug-benchmark"


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, whose CPU is thus not the asking thread's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def post(app: Any, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to one `form` for `/v1/encode`."""
    kind = b"multipart/form-data; boundary=" + _BOUNDARY
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/encode", "raw_path": b"/v1/encode", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", kind), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def form(fields: Mapping[str, bytes], image: bytes) -> bytes:
    """A multipart body with these fields and an image file."""
    parts = [
        *(f'name="{name}"\r\n\r\n'.encode() + value for name, value in fields.items()),
        b'name="image"; filename="a.jpg"\r\ncontent-type: image/jpeg\r\n\r\n' + image,
    ]
    whole = (b"--" + _BOUNDARY + b"\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts)
    return b"".join(whole) + b"--" + _BOUNDARY + b"--\r\n"


def jpeg(width: int, height: int, *, seed: int = 7, comment: bytes = b"") -> bytes:
    """A file of coarse patches: one seed and size are always the same pixels."""
    coarse = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(
        out, "JPEG", quality=90, comment=comment
    )
    return out.getvalue()


def others_s() -> float:
    """CPU seconds of this process's other threads so far."""
    return time.process_time() - time.thread_time()


def process_s(pid: int) -> float:
    """CPU seconds of another process's threads so far."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) * 1e-9
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
