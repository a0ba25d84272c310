"""A stream of images from several apps, answered by transformers or by an encoder service."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from cornplug import EncoderClient
from devkit.photos import photos

_IN_FLIGHT = 6
"""Requests that one app has under way."""
_SIDES = (224, 280, 336, 448, 560, 700)


@dataclass(frozen=True, slots=True)
class Ask:
    """One app's request: a model's number, and a file."""

    model: int
    image: bytes


def stream(models: Sequence[Path], each: int, repeated: float, seed: int) -> list[Ask]:
    """`each` requests for each model, in turns, a share of them for images that came before.

    No image comes in two streams of different seeds.
    """
    rng = np.random.default_rng([1000 + seed, int(100 * repeated)])
    asks: list[Ask] = []
    for i in range(each * len(models)):
        model = i % len(models)
        # The LLaVAs ask about each other's images, Qwen2-VL about its own.
        before = [ask for ask in asks if (ask.model == 2) == (model == 2)]
        if before and rng.random() < repeated:
            asks.append(Ask(model, before[rng.integers(len(before))].image))
        else:
            asks.append(Ask(model, _crop(rng)))
    return asks


class Transformers:
    """The vision halves of the models, as transformers runs them."""

    def __init__(self, models: Sequence[Path]) -> None:
        self._models = [_model(path) for path in models]
        self._processors = [AutoImageProcessor.from_pretrained(path) for path in models]

    @torch.inference_mode()
    def embed(self, ask: Ask) -> np.ndarray:
        """(rows, hidden) in float32."""
        with Image.open(io.BytesIO(ask.image)) as image:
            made = self._processors[ask.model](images=image.convert("RGB"), return_tensors="pt")
        model = self._models[ask.model]
        given = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in made.items()}
        output = model.get_image_features(**given).pooler_output
        out = output if isinstance(output, torch.Tensor) else torch.cat([*output])
        return out.reshape(-1, out.shape[-1]).float().numpy()

    def choose_threads(self, asks: Sequence[Ask], counts: Sequence[int]) -> int:
        """Have torch use as many threads as answer `asks` soonest: all cores on a quiet machine,
        but on a busy one threads that wait for each other at every layer lose."""

        def seconds(count: int) -> float:
            torch.set_num_threads(count)
            self._answer(asks)
            began = time.perf_counter()
            self._answer(asks)
            return time.perf_counter() - began

        best = min(counts, key=seconds)
        torch.set_num_threads(best)
        return best

    def _answer(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.embed(ask)


def ask_service(url: str, asks: Sequence[Ask]) -> list[np.ndarray]:
    """Every answer of the service, (rows, hidden) in float32, the apps asking side by side."""
    out: list[Any] = [None] * len(asks)
    apps = sorted({ask.model for ask in asks})
    with EncoderClient(url, deadline_s=300) as client:
        names = _served(url)

        def one(app: int) -> None:
            mine = [i for i, ask in enumerate(asks) if ask.model == app]
            files = [asks[i].image for i in mine]
            for place, ref in client.encode_many(files, model=names[app], concurrency=_IN_FLIGHT):
                if isinstance(ref, Exception):
                    raise ref
                out[mine[place]] = ref.tensor().float().numpy()

        with ThreadPoolExecutor(len(apps)) as threads:
            list(threads.map(one, apps))
    return out


def _served(url: str) -> list[str]:
    import httpx

    rows = httpx.get(f"{url}/v1/models", timeout=10, trust_env=False).raise_for_status().json()["models"]
    return [row["name"] for row in rows]


def _model(path: Path) -> Any:
    name = AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(transformers, name).from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.eval()


def _crop(rng: np.random.Generator) -> bytes:
    """A piece of a photograph, of random place and size."""
    every = photos()
    while True:
        photo = every[rng.integers(len(every))]
        width, height = (int(rng.choice(_SIDES) + rng.integers(-8, 9)) for _ in range(2))
        if width <= photo.width and height <= photo.height:
            break
    left, top = int(rng.integers(photo.width - width + 1)), int(rng.integers(photo.height - height + 1))
    out = io.BytesIO()
    with Image.open(io.BytesIO(photo.data)) as image:
        image.convert("RGB").crop((left, top, left + width, top + height)).save(out, "JPEG", quality=92)
    return out.getvalue()
