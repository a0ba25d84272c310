"""A server that would preprocess images on its GPU, as SGLang decides it, and as the hooks do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.multimodal.processors import base_processor

from cornplug.config import Config, load
from cornplug.sglang_hooks import plugin
from cornplug.sglang_hooks.media import preprocessing
from cornplug.sglang_hooks.media.preprocessing import preprocesses_on_cpu

from ..hooked import hook_of

make_processor = hook_of(preprocessing, "BaseMultimodalProcessor.__init__")


def config(how: str, encoder: Path) -> Config:
    return load({"engine.sglang_preprocessing": how, "encoder.socket": str(encoder)}, environ={})


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A processor of a server on CUDA, which has got no image yet."""
    cuda = SimpleNamespace(is_cuda_alike=lambda: True, device_type="cuda")
    monkeypatch.setattr(base_processor, "_is_cpu", False)
    monkeypatch.setattr(base_processor, "platforms", SimpleNamespace(current_platform=cuda))
    plain = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    monkeypatch.setattr(base_processor, "get_exec", lambda: plain)

    class Processor(base_processor.BaseMultimodalProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.server_args = SimpleNamespace(base_gpu_id=1)
            self.disable_fast_image_processor = False
            self._processor = SimpleNamespace(
                image_processor=object.__new__(base_processor.BaseImageProcessor)
            )

        async def process_mm_data_async(self, *args: Any, **kwargs: Any) -> None: ...

    return Processor()


def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of this part, as SGLang's registry applies them."""
    for hook in preprocessing.HOOKS:
        name = hook.target.rpartition(".")[2]
        if hook.kind == "around":
            original = getattr(base_processor.BaseMultimodalProcessor, name)

            def around(
                this: Any, *args: Any, f: Callable[..., Any] = hook.function, o: Any = original
            ) -> Any:
                return f(o, this, *args)

            monkeypatch.setattr(base_processor.BaseMultimodalProcessor, name, around)


def test_cpu_preprocessing_on_gpu_server_moves_images_to_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = on_gpu(monkeypatch)
    assert processor._fast_image_processor_device(processor._processor) == "cuda:1"
    assert processor._resolve_auto_mm_processor_worker_num() == 1
    assert processor.gpu_image_decode
    hooked(monkeypatch)
    make_processor(processor, None, server_args=None)
    assert processor._fast_image_processor_device(processor._processor) == "cpu"
    assert processor._resolve_auto_mm_processor_worker_num() == 2
    assert not type(processor).gpu_image_decode
    assert base_processor.BaseMultimodalProcessor.gpu_image_decode


@pytest.mark.parametrize(
    ("how", "device", "family", "dtype", "expected"),
    [
        ("cpu", "cuda", "qwen2_vl", "float32", True),
        ("device", "cuda", "qwen2_vl", "float32", False),
        ("auto", "cuda", "qwen2_vl", "float32", False),
        ("cpu", "cpu", "qwen2_vl", "float32", False),
        ("cpu", "xpu", "qwen2_vl", "float32", False),
        ("cpu", "cuda", "internvl_chat", "float32", False),
        ("cpu", "cuda", "qwen2_vl", "float64", False),
    ],
)
def test_cpu_preprocessing_is_wanted_by_setting_device_and_model(
    how: str, device: str, family: str, dtype: str, expected: bool, short_path: Path
) -> None:
    assert (
        preprocesses_on_cpu(config(how, short_path / "e"), device=device, family=family, dtype=dtype)
        is expected
    )


def test_cpu_preprocessing_is_default_beside_encoder_service(short_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(short_path / "e"))
    assert not preprocesses_on_cpu(
        config("auto", short_path / "e"), device="cuda", family="qwen2_vl", dtype="float32"
    )
    listener.listen()
    assert preprocesses_on_cpu(
        config("auto", short_path / "e"), device="cuda", family="qwen2_vl", dtype="float32"
    )
    listener.close()


def test_cpu_preprocessing_is_default_beside_encoder_service_of_another_host(short_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    urls = f"http://127.0.0.1:1, http://127.0.0.1:{listener.getsockname()[1]}"
    beside = load({"encoder.engine_urls": urls, "encoder.socket": str(short_path / "e")}, environ={})
    assert preprocesses_on_cpu(beside, device="cuda", family="qwen2_vl", dtype="float32")
    listener.close()
    assert not preprocesses_on_cpu(beside, device="cuda", family="qwen2_vl", dtype="float32")


def test_cpu_preprocessing_has_its_own_part_of_hooks() -> None:
    assert plugin.hooks_of({"cpu_images"}) == preprocessing.HOOKS
