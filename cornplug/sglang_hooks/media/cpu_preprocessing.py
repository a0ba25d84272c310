"""Lets a GPU server decode and resize images on the CPU, like vLLM and the encoder service.

On CUDA, SGLang decodes JPEGs with nvJPEG and resizes in float32, and Pillow and torchvision on a CPU compute
different pixels. With SGLang's default, a server therefore shares embeddings of images only with similar
servers (`preprocessing_probe.py` detects this), and the tower runs once for these servers and once for all
other engines. SGLang's authors measured 9.3 full-page images per second with preprocessing on a GB300 and one
worker, and 8.8 with preprocessing on its CPU and two workers
(`BaseMultimodalProcessor._resolve_auto_mm_processor_worker_num`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from cornplug.config import Config, EncoderConfig
from cornplug.sglang_hooks.compat import Hook, logger, validated_families

_ANSWER_S: Final = 0.5


def wanted(config: Config, *, device: str, family: str, dtype: str) -> bool:
    """Return whether a server on `device` preprocesses images of `family` on its CPU, and log the
    decision."""
    # ROCm's device is also named "cuda". On other devices, SGLang's own choice is kept.
    if device != "cuda" or not config.engine.share_embeddings or family not in validated_families(dtype):
        return False
    how = config.engine.sglang_preprocessing
    if how == "auto":
        how = "cpu" if _answers(config.encoder) else "device"
    if how == "cpu":
        logger.info(
            "cornplug: images are decoded and resized on the CPU, as in vLLM and the encoder service, so "
            'their embeddings are shared. Set engine.sglang_preprocessing = "device" to use the GPU'
        )
    else:
        logger.warning(
            "cornplug: the GPU decodes and resizes images. The pixels differ from those of vLLM and the "
            "encoder service, so their embeddings are not shared with this server. Set "
            'engine.sglang_preprocessing = "cpu" to share them'
        )
    return how == "cpu"


def _answers(config: EncoderConfig) -> bool:
    """Return whether an encoder service listens at an address that the engine uses for embeddings."""
    for url in config.engine_urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with contextlib.suppress(OSError), socket.create_connection((parts.hostname or "", port), _ANSWER_S):
            return True
    if config.engine_urls:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(config.socket))
        except OSError:
            return False
    return True


def _device(original: Callable[..., Any], this: Any, processor: Any) -> str:
    return "cpu"


def _competes(original: Callable[..., Any], this: Any) -> bool:
    """Return False, so that SGLang uses two workers, as it does for preprocessing on a CPU."""
    return False


def _making(this: Any, *_args: Any, **_kwargs: Any) -> None:
    # Set the attribute on the class, because SGLang reads it from there. A process serves only one model.
    type(this).gpu_image_decode = False


_BASE: Final = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_BASE}.__init__", "before", _making),
    Hook(f"{_BASE}._fast_image_processor_device", "around", _device),
    Hook(f"{_BASE}._preprocessing_competes_with_the_scheduler", "around", _competes),
)
