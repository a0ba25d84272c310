"""Embeddings of pictures from a running `cornplug encoder`, as an app would use them.

    cornplug encoder --model llava-hf/llava-1.5-7b-hf &
    python examples/encoder_client.py llava-hf/llava-1.5-7b-hf photo.jpg another.png

MODEL is a name that the encoder was started with. The second round finds every picture known.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from cornplug import AsyncEncoderClient, EncoderClient
from cornplug.errors import CornplugError


def one_by_one(model: str, pictures: Sequence[str]) -> None:
    """The plain client."""
    with EncoderClient() as client:
        for picture in pictures:
            ref = client.encode(picture, model=model)
            array = ref.numpy()  # (rows, hidden_size), read-only; ref.tensor() for torch
            print(f"{picture}: {ref.dtype} {array.shape}, tower {ref.tower}, {1000 * ref.seconds:.1f} ms")


async def all_at_once(model: str, pictures: Sequence[str]) -> None:
    """The same for asyncio: the service batches what arrives together."""
    async with AsyncEncoderClient() as client:
        refs = await asyncio.gather(*(client.encode(picture, model=model) for picture in pictures))
    for picture, ref in zip(pictures, refs, strict=True):
        print(f"{picture}: key {ref.key.hex()[:16]}, tower {ref.tower}")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("usage: encoder_client.py MODEL PICTURE ...", file=sys.stderr)
        return 2
    try:
        one_by_one(argv[0], argv[1:])
        asyncio.run(all_at_once(argv[0], argv[1:]))
    except CornplugError as e:
        print(f"encoder_client: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
