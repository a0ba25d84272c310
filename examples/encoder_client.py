"""Embeddings of images from one or several `cornplug encoder`, as an app would use them.

    cornplug encoder --model llava-hf/llava-1.5-7b-hf &
    python examples/encoder_client.py llava-hf/llava-1.5-7b-hf photo.jpg another.png

MODEL is a name that the encoder was started with. For several services set
CORNPLUG_ENCODER_URLS="http://a:8750, http://b:8750": each image has its own order of them, and
while one is down the next one answers. Kill one while this runs, and every image is answered.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from cornplug import AsyncEncoderClient, EncoderClient
from cornplug.errors import CornplugError


def three_lines(model: str, image: str) -> None:
    """All that a notebook needs."""
    client = EncoderClient()
    ref = client.encode(image, model=model)
    array = ref.numpy()  # (rows, hidden_size), read-only; ref.tensor() for torch

    print(f"{image}: {ref.dtype} {array.shape}, {ref.origin}, {1000 * ref.service_time_s:.1f} ms")
    client.close()


def many(model: str, images: Sequence[str]) -> int:
    """A folder of images, each as it finishes: an error is one image's, not the loop's."""
    failures = 0
    with EncoderClient(app="example") as client:
        for index, result in client.encode_many(images, model=model):
            if isinstance(result, CornplugError):
                failures += 1
                print(f"{images[index]}: {result.reason}: {result}", file=sys.stderr)
            else:
                print(f"{images[index]}: key {result.key.hex()[:16]}, {result.origin}")
    return failures


async def for_asyncio(model: str, images: Sequence[str]) -> None:
    """The same in an event loop: the service batches images that arrive together."""
    async with AsyncEncoderClient() as client:
        async for index, result in client.encode_many(images, model=model):
            print(f"{images[index]}: {result if isinstance(result, CornplugError) else result.shape}")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("usage: encoder_client.py MODEL IMAGE ...", file=sys.stderr)
        return 2
    try:
        three_lines(argv[0], argv[1])
        failures = many(argv[0], argv[1:])
        asyncio.run(for_asyncio(argv[0], argv[1:]))
    except CornplugError as e:
        print(f"encoder_client: {e}", file=sys.stderr)
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
