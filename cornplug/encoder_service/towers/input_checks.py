"""Validation of a tower's inputs, and conversion of wire tensors and bytes to torch."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import torch

from cornplug.encoder_service.towers.base import TowerInput
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import ConfigError, EncoderRefused

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}
FLOATS: Final = ("float32", "float16", "bfloat16")
INTEGERS: Final = ("int64", "int32")
BOOLEAN: Final = "bool"


def float_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a floating-point dtype name. Raises ConfigError for any other name."""
    if name not in FLOATS:
        raise ConfigError("--dtype", f"unknown dtype {name!r}", f"Set one of {', '.join(FLOATS)}.")
    return DTYPES[name]


def bad_input(field: str, problem: str) -> EncoderRefused:
    """Return the error for an invalid input. The message starts with the field's name."""
    return EncoderRefused(f"{field}: {problem}", reason="bad_input")


def check_names(
    inputs: Mapping[str, TowerInput], wanted: Iterable[str], optional: Container[str] = ()
) -> None:
    """Check that exactly the wanted fields are present, except that fields in `optional` may be absent.

    Raises EncoderRefused("bad_input").
    """
    wanted = tuple(wanted)
    for name in wanted:
        if name not in inputs and name not in optional:
            raise bad_input(name, f"missing; this tower needs {', '.join(wanted)}")
    for name in inputs:
        if name not in wanted:
            raise bad_input(name, f"unknown; this tower accepts {', '.join(wanted)}")


def checked(field: str, value: TowerInput, accepted: tuple[str, ...]) -> torch.Tensor:
    """Validate an input and return it as a tensor. The bytes of a `WireTensor` are copied.

    Raises EncoderRefused("bad_input") as `from_wire` does.
    """
    if isinstance(value, WireTensor):
        return from_wire(field, value, accepted)
    _check_dtype(field, dtype_name(value.dtype), accepted)
    _check_shape(field, tuple(value.shape))
    _check_finite(field, value)
    return value.contiguous()


def from_wire(field: str, tensor: WireTensor, accepted: tuple[str, ...]) -> torch.Tensor:
    """Validate a wire tensor and return it as a torch tensor that owns its memory.

    Raises EncoderRefused("bad_input") if the dtype is not accepted, dimensions are missing or not positive,
    the bytes do not fill the shape, or a value is NaN or infinite.
    """
    _check_dtype(field, tensor.dtype, accepted)
    dtype = DTYPES[tensor.dtype]
    _check_shape(field, tensor.shape)
    expected = math.prod(tensor.shape) * dtype.itemsize
    if len(tensor.data) != expected:
        raise bad_input(
            field, f"{len(tensor.data)} bytes, but shape {tensor.shape} of {tensor.dtype} has {expected}"
        )
    if dtype == torch.bool:
        # Convert the bytes, because bytes other than 0 and 1 would be invalid bools in torch.
        return torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).reshape(tensor.shape) != 0
    # Copy the bytes, because the tensor may be written to and may outlive the frame that contains them.
    out = torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
    _check_finite(field, out)
    return out


def _check_dtype(field: str, dtype: str, accepted: tuple[str, ...]) -> None:
    if dtype not in accepted:
        raise bad_input(field, f"dtype must be one of {', '.join(accepted)}, not {dtype!r}")


def _check_shape(field: str, shape: tuple[int, ...]) -> None:
    if not shape or any(size <= 0 for size in shape):
        raise bad_input(field, f"shape {shape} is empty")


def _check_finite(field: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    # aminmax needs one pass and no temporary tensor. If there is a NaN, both results are NaN.
    least, greatest = torch.aminmax(tensor)
    if not (math.isfinite(least) and math.isfinite(greatest)):
        raise bad_input(field, "has NaN or infinite values")


def concat_on_device(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return all parts concatenated on the device.

    For CUDA, `InProcessExecutor` has already copied the parts through pinned memory, so `to` does not copy.
    """
    return torch.cat([part.to(device) for part in parts])


def from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that uses these bytes without a copy. Raises ValueError if they do not fill the
    shape."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not fill {shape} of {dtype}")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
