"""CUDA as far as torch goes without a GPU: FakeTensorMode on "cuda:0", and a record of the operations.

    with record_cuda(recorder := CudaRecorder()):
        tensor = torch.empty(8, device="cuda:0")   # shapes and devices, no values

Name the device with its index: a build of torch without CUDA takes "cuda" for another device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_COPY: Final = torch.ops.aten.copy_.default
_CUDA, _META = 1, 14
"""c10::DeviceType"""


class CudaRecorder(TorchDispatchMode):
    """What is done with fake CUDA tensors, and with CUDA itself, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self.pinned: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format and kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            self.pinned.append(made.untyped_storage()._cdata)
            return made
        made = func(*args, **kwargs)
        if func is _COPY:
            self._crossing(args[0], args[1], bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
        elif func is torch.ops.aten._to_copy.default:
            self._crossing(made, args[0], bool(kwargs.get("non_blocking")))
        elif func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            self.note(func.__name__.split(".")[0])
        return made

    def _crossing(self, target: torch.Tensor, source: torch.Tensor, late: bool) -> None:
        """Note a copy from one device to another, and how PyTorch does it."""
        if target.device == source.device:
            return
        host = target if target.device.type == "cpu" else source
        self.note(
            f"{source.device.type} to {target.device.type}",
            "late" if late else "waited for",
            # As `copy_requires_temporaries` of ATen/native/cuda/Copy.cu.
            "whole" if target.is_contiguous() and source.is_contiguous() else "by temporary",
            "pinned" if host.untyped_storage()._cdata in self.pinned else "pageable",
        )

    def note(self, *what: Any) -> None:
        self.events.append(what)


@contextmanager
def record_cuda(recorder: CudaRecorder) -> Iterator[None]:
    """FakeTensorMode with a device "cuda:0", in any build of torch; streams and events only
    record their calls."""
    lend_device_guard()
    here = threading.local()

    def event(*, blocking: bool = False) -> Any:
        return SimpleNamespace(
            record=lambda stream: recorder.note("event recorded on", stream.name),
            synchronize=lambda: recorder.note("event waited for"),
        )

    def stream(device: Any, priority: int = 0) -> Any:
        name = "ours, urgent" if priority < 0 else "ours"
        return SimpleNamespace(name=name, wait_event=lambda mark: recorder.note("our stream waits"))

    @contextmanager
    def on(of: Any) -> Iterator[None]:
        here.stream = of
        yield
        here.stream = None

    def set_device(device: Any) -> None:
        recorder.note("device set in", threading.current_thread().name)

    with (
        mock.patch("torch.cuda.Event", event),
        mock.patch("torch.cuda.Stream", stream),
        mock.patch("torch.cuda.stream", on),
        mock.patch("torch.cuda.current_stream", return_value=SimpleNamespace(name="the engine's")),
        mock.patch("torch.cuda.set_device", set_device),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        yield


def lend_device_guard() -> None:
    """A build for CPUs has no device guard for CUDA: lend it the one of "meta", which does nothing.

    Torch lends itself one in `_ensureCUDADeviceGuardSet`, but only where CUDA is linked in.
    """
    if torch.cuda._is_compiled():
        return
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
