"""A simulated GPU: torch's FakeTensorMode for tensors on the device, real arithmetic for those on the CPU.

FakeTensorMode knows shapes, dtypes and devices, and refuses what a GPU would refuse: operands on two
devices, an `out` on another one, a number read out of a tensor that is on the device. Tensors on the CPU
are computed for real here, so that grids and lengths can be read, as they are on a GPU's host.
Streams, events and the current device of each thread are stand-ins that record the calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from devkit.cuda_recorder import lend_device_guard

CAPABILITY = (9, 0)
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to)


class Mixed(TorchDispatchMode):
    """Calls that touch the device go to FakeTensorMode, others are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.streams_told: list[torch.Tensor] = []
        """Tensors whose memory was said to be in use on another stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.record_stream.default:
            self.streams_told.append(args[0])
            return None
        # Pinned memory is the CPU's, and there is none to be had without a GPU.
        kwargs.pop("pin_memory", None)
        if func is torch.ops.aten._pin_memory.default:
            return args[0].clone()
        leaves = tree_leaves((args, kwargs))
        fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        device = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if func.overloadpacket in _COPIES and device and not fake:
            # FakeTensorMode would compute it for real, as a constant.
            dtype = next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), args[0].dtype)
            to = next(leaf for leaf in leaves if isinstance(leaf, torch.device))
            return torch.ops.aten.empty_like.default(args[0], dtype=dtype, device=to)
        if fake or device:
            return func(*args, **kwargs)  # FakeTensorMode is the next to see it
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class SimulatedGpu:
    """Records the calls of streams, and their devices."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self.mode = Mixed()
        self.on_synchronize: Callable[[], None] = lambda: None
        """Called when a thread waits for the device."""
        self._here = threading.local()

    @property
    def device(self) -> int:
        """The calling thread's."""
        return getattr(self._here, "device", 0)

    @contextlib.contextmanager
    def on(self, device: Any) -> Iterator[None]:
        """As `torch.cuda.device`."""
        before, self._here.device = self.device, torch.device(device).index or 0
        try:
            yield
        finally:
            self._here.device = before


class _Stream:
    def __init__(self, cuda: SimulatedGpu, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def record_event(self) -> _Stream:
        self._cuda.done.append(("record", self.name))
        return self

    def wait_event(self, event: _Stream) -> None:
        self._cuda.done.append(("wait", (self.name, event.name)))

    def synchronize(self) -> None:
        self._cuda.done.append(("synchronize", self.name))
        self._cuda.on_synchronize()


class _Event:
    def __init__(self) -> None:
        self._stream: _Stream | None = None

    def record(self, stream: _Stream) -> None:
        stream.record_event()
        self._stream = stream

    def synchronize(self) -> None:
        assert self._stream is not None
        self._stream.synchronize()


@contextlib.contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Tensors may be on "cuda" inside it, in this thread and in those that enter `SimulatedGpu.mode`."""
    lend_device_guard()
    cuda = SimulatedGpu()

    @contextlib.contextmanager
    def stream(one: _Stream) -> Iterator[None]:
        cuda.done.append(("enter", one.name))
        yield
        cuda.done.append(("leave", one.name))

    with pytest.MonkeyPatch.context() as patch:
        names = cycle(("inputs", "results"))
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: _Stream(cuda, next(names)))
        patch.setattr(torch.cuda, "Event", lambda *, blocking: _Event())
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda *_: _Stream(cuda, "compute"))
        patch.setattr(torch.cuda, "device", cuda.on)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: CAPABILITY)
        # `record_stream` wants a real stream before anything is dispatched.
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, _: cuda.mode.streams_told.append(tensor))
        with FakeTensorMode(allow_non_fake_inputs=True), cuda.mode:
            yield cuda
