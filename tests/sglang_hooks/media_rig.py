"""Items as SGLang's processors make them, and an encoder service that does as it is told."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from cornplug.config import Config, EncoderConfig, EngineConfig, StoreConfig
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest
from cornplug.errors import EncoderError
from cornplug.store.base import Store

SECRET = bytes(range(32))
TOWER = b"t" * 32


def runtime(store: Store, **encoder: Any) -> Any:
    """A process's Runtime over any store."""
    config = Config(store=StoreConfig(), encoder=EncoderConfig(**encoder), engine=EngineConfig(app="test"))
    return SimpleNamespace(
        config=config, app="test", secret=SECRET, store=store, deadline_s=0.1, background_timeout_s=1.0
    )


def sample_image(seed: int = 0, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> Image.Image:
    """Noise."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    array = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(array.squeeze(-1) if channels == 1 else array, mode)


def item(
    seed: int = 0, *, start: int = 0, rows: int = 4, modality: Modality = Modality.IMAGE
) -> MultimodalDataItem:
    """One medium of `rows` placeholder tokens that begin at `start`."""
    return MultimodalDataItem(
        modality=modality,
        offsets=[(start, start + rows - 1)],
        feature=torch.full((rows * 4, 6), float(seed)),
        model_specific_data={"image_grid_thw": torch.tensor([[1, 4, rows]])},
    )


class Service:
    """Stands in for SocketEncoder: `answer(request)` gives an answer or an error; without it all wait."""

    refusal: EncoderError | None = None
    """As of a service that is there."""

    def __init__(self) -> None:
        self.asked: list[EncodeRequest] = []
        self.answer: Any = None
        self.futures: list[Future[EncodeReply]] = []

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        future: Future[EncodeReply] = Future()
        self.asked.append(request)
        self.futures.append(future)
        if self.answer is not None:
            reply = self.answer(request)
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
        return future

    def close(self) -> None:
        pass
