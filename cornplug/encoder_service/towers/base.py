"""Common interface of all towers: validated inputs -> features -> embeddings.

    wire tensors ──prepare──> TowerItem ──encode──> features ──project──> embedding
                              (CPU)                 (rows, width)         (rows, hidden)
                                  └─ shared by models ─┘       └─ per model ─┘

`ModelFamily.tower_class` names the `TowerArchitecture` of a family. Several families may share an
architecture.

Modules are created on the meta device, and `fill_weights` reads only the tensors that they contain. Therefore
the LLM and unused layers take no memory.

`PassScheduler` runs one tower pass at a time on a device. A pass can be paused or ended between two layers.
Without pauses, a pass for one huge image, which may take minutes, would block all other passes.

    pass of a worse class   layer layer ┆ ─ paused ─ ┆ layer layer          abandoned by all its callers: ends
    pass of a better class              ┆layer…layer ┆

A paused pass continues before the next urgent pass if it has run for less than its class's share of the time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.errors import CheckpointError, ConfigError, EncoderRefused
from cornplug.identity import array_digest

_MAX_NAMES_SHOWN: Final = 5
TowerInput: TypeAlias = WireTensor | torch.Tensor
"""Input of a tower: a tensor as bytes from another process, or a tensor from this process."""
_thread: Final = threading.local()
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
FLOAT_DTYPES: Final = ("float32", "float16", "bfloat16")
INTEGER_DTYPES: Final = ("int64", "int32")
BOOL_DTYPE: Final = "bool"


def fill_weights(
    module: nn.Module,
    located: dict[str, tuple[Path, str]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Load every parameter of `module` from the locations that `Checkpoint.locate` returned.

    Args:
        located: (file, name in the file) of each tensor, by normalised name.
        unused: Function that returns whether this module does not need a tensor of the checkpoint. Examples
            are the layers after the cut, which is the layer whose output is cached.

    Raises CheckpointError("bad_tensors") with the names of tensors that are missing, unknown, quantised or of
    another shape, or CheckpointError("unreadable") if a file is corrupt.
    """
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - located.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {format_names(missing)}", reason="bad_tensors")
    unexpected = sorted(name for name in located.keys() - wanted.keys() if not unused(name))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has unknown tensors: {format_names(unexpected)}", reason="bad_tensors"
        )
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name in wanted:
        file, stored = located[name]
        by_file[file].append((name, stored))
    loaded: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        loaded.update(_read_tensors(file, names, dtype, device))
    wrong = [
        f"{name} {tuple(loaded[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if loaded[name].shape != wanted[name].shape
    ]
    if wrong:
        raise CheckpointError(f"shapes do not match config.json: {format_names(wrong)}", reason="bad_tensors")
    module.load_state_dict(loaded, assign=True)
    module.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerItem:
    """Validated inputs of one media item, in the tower's dtype, on the CPU."""

    tensors: tuple[torch.Tensor, ...]
    tokens: int
    """Number of rows that attention processes for this item. The size of a batch is limited in such
    tokens."""
    geometry: tuple[int, ...] = ()
    """Properties of the item that the projector needs in addition to its features (tiles, image size)."""
    names_digest: bytes | None = None
    """Digest of the tensors' names, or None if all items of the tower have the same names."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests that identify this item, for `identity.feature_key`: `names_digest`, if set, and
        `identity.array_digest` of each tensor.

        Each access computes the digests, which reads all bytes of the tensors. They are needed only if
        features are shared.
        """
        names = () if self.names_digest is None else (self.names_digest,)
        return (*names, *map(_digest_of, self.tensors))


class Tower(Protocol):
    """Part of the model up to the cut between tower and projector. Only one thread calls its methods, except
    `prepare`.

    Each replica process loads the tower from the checkpoint (`replica_main`).
    """

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one media item's inputs. Thread-safe.

        The result may share the memory of tensors in `inputs`. Raises EncoderRefused("bad_input") with the
        name of a field that is missing, unknown, not finite, or of the wrong dtype or shape.
        """

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return each item's features, of shape (rows, width). They do not depend on other items in the
        batch."""


class Projector(Protocol):
    """Part of the model after the cut, which computes embeddings from features."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return the embeddings, each contiguous and of shape (rows, hidden_size). `items` has the items from
        which `features` were computed."""


class TowerArchitecture(Protocol):
    """Loads a family's towers and projectors. Both methods raise CheckpointError with the names of missing or
    unknown tensors."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower: ...

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Projector: ...


def float_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a floating-point dtype name. Raises ConfigError for any other name."""
    if name not in FLOAT_DTYPES:
        raise ConfigError("--dtype", f"unknown dtype {name!r}", f"Set one of {', '.join(FLOAT_DTYPES)}.")
    return DTYPES[name]


def bad_input(field: str, problem: str) -> EncoderRefused:
    """Return the error for an invalid input. The message starts with the field's name."""
    return EncoderRefused(f"{field}: {problem}", reason="bad_input")


def check_input_names(
    inputs: Mapping[str, TowerInput], required: Iterable[str], optional: Container[str] = ()
) -> None:
    """Check that exactly the wanted fields are present. Fields in `optional` may be absent.

    Raises EncoderRefused("bad_input").
    """
    required = tuple(required)
    for name in required:
        if name not in inputs and name not in optional:
            raise bad_input(name, f"missing; this tower needs {', '.join(required)}")
    for name in inputs:
        if name not in required:
            raise bad_input(name, f"unknown; this tower accepts {', '.join(required)}")


def validate_input(field: str, value: TowerInput, accepted: tuple[str, ...]) -> torch.Tensor:
    """Validate an input and return it as a tensor. The read-only bytes of a `WireTensor` are copied.

    Raises the same errors as `from_wire`.
    """
    if isinstance(value, WireTensor):
        return from_wire(field, value, accepted)
    _check_dtype(field, dtype_name(value.dtype), accepted)
    _check_shape(field, tuple(value.shape))
    _check_finite(field, value)
    return value.contiguous()


def from_wire(field: str, tensor: WireTensor, accepted: tuple[str, ...]) -> torch.Tensor:
    """Validate a wire tensor and return it as a torch tensor. The tensor uses the bytes of a writable buffer,
    which no other process can change, and a copy of other bytes.

    Raises EncoderRefused("bad_input") if the dtype is not accepted, if the shape has no dimensions or a
    dimension that is not positive, if the bytes do not fill the shape, or if a value is NaN or infinite.
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
    # The tensor may be modified.
    data = tensor.data if not memoryview(tensor.data).readonly else bytearray(tensor.data)
    out = torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
    _check_finite(field, out)
    return out


def concat_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return all parts concatenated on the device.

    For CUDA, `InProcessExecutor` has already copied the parts through pinned memory, so `to` does not copy.
    """
    return torch.cat([part.to(device) for part in tensors])


def tensor_from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that uses these bytes without a copy. Raises ValueError if the bytes do not fill the
    shape."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not fill {shape} of {dtype}")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


class PassAbandoned(Exception):
    """Raised to end a pass for which no caller waits any more."""


def between_layers(*_: Any) -> None:
    """Allow this thread's pass to be paused or ended. Registered as a forward pre-hook of a tower's layers.

    Raises PassAbandoned if no caller waits for the pass any more.
    """
    current: TowerPass | None = getattr(_thread, "current", None)
    if current is not None:
        current.between_layers()


class TowerPass:
    """Running or paused pass of a tower."""

    def __init__(
        self, scheduler: PassScheduler, *, urgent: bool, share: float, is_abandoned: Callable[[], bool]
    ) -> None:
        self._scheduler = scheduler
        self._share = share
        self._is_abandoned = is_abandoned
        self._began_s = scheduler.clock()
        self.urgent: Final = urgent
        self.waited_s = 0.0
        """Seconds for which the pass waited for the device before it began."""
        self.paused_s = 0.0
        """Seconds for which the pass was paused while urgent passes ran."""

    def between_layers(self) -> None:
        """Pause while urgent passes run. Raises PassAbandoned if no caller waits for this pass any more."""
        if self._is_abandoned():
            raise PassAbandoned("no request waits for this pass")
        if not self.urgent:
            self._scheduler.yield_to_urgent(self)

    @property
    def is_below_share(self) -> bool:
        """Whether the pass has run for less than its share of the time since it began."""
        whole_s = self._scheduler.clock() - self._began_s
        return whole_s - self.paused_s < self._share * whole_s


class PassScheduler:
    """Schedules the passes on one device. Thread-safe. At most one urgent pass at a time may wait or run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock: Final = clock
        self._changed = threading.Condition()
        self._busy = False
        self._paused = False
        self._granted = False
        """Whether a pass has paused for an urgent pass that has not begun yet."""
        self._urgent = 0
        """Number of urgent passes that wait for the device."""

    @contextmanager
    def acquire(self, *, urgent: bool, share: float, is_abandoned: Callable[[], bool]) -> Iterator[TowerPass]:
        """Wait for the device, and occupy the device for this thread's pass for the duration of the context.

        Args:
            urgent: Whether this pass overtakes waiting passes, and pauses the running pass between two
                layers.
            share: Fraction of the time that this pass gets while urgent passes run.
            is_abandoned: Function that returns whether no caller waits for this pass any more.
        """
        asked_s = self.clock()
        with self._changed:
            self._urgent += urgent
            self._changed.wait_for(self._can_start_urgent if urgent else self._can_start)
            self._urgent -= urgent
            self._granted = False
            self._busy = True
        _thread.current = current = TowerPass(self, urgent=urgent, share=share, is_abandoned=is_abandoned)
        current.waited_s = self.clock() - asked_s
        try:
            yield current
        finally:
            _thread.current = None
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def yield_to_urgent(self, current: TowerPass) -> None:
        """Let waiting urgent passes run on their threads, and return when this pass may continue."""
        with self._changed:
            while self._urgent and not current.is_below_share:
                began_s = self.clock()
                self._busy, self._paused, self._granted = False, True, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._busy and not self._granted)
                self._busy, self._paused = True, False
                current.paused_s += self.clock() - began_s

    def _can_start(self) -> bool:
        return not (self._busy or self._paused or self._urgent)

    def _can_start_urgent(self) -> bool:
        return not self._busy and (self._granted or not self._paused)


def _read_tensors(
    file: Path, names: list[tuple[str, str]], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name, stored in names:
                tensor = tensors.get_tensor(stored)
                if not tensor.is_floating_point():
                    raise CheckpointError(
                        f"{stored} is {tensor.dtype}: quantised towers and projectors are not supported",
                        reason="bad_tensors",
                    )
                out[name] = tensor.to(device=device, dtype=dtype, copy=True)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
    return out


def format_names(names: Sequence[str]) -> str:
    """Return the first names for an error message, and the number of the remaining names."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _digest_of(tensor: torch.Tensor) -> bytes:
    return array_digest(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))


def _check_dtype(field: str, dtype: str, accepted: tuple[str, ...]) -> None:
    if dtype not in accepted:
        raise bad_input(field, f"dtype must be one of {', '.join(accepted)}, not {dtype!r}")


def _check_shape(field: str, shape: tuple[int, ...]) -> None:
    if not shape or any(size <= 0 for size in shape):
        raise bad_input(field, f"shape {shape} is empty")


def _check_finite(field: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    # aminmax needs one pass and no temporary tensor. If a value is NaN, both results are NaN.
    least, greatest = torch.aminmax(tensor)
    if not (math.isfinite(least) and math.isfinite(greatest)):
        raise bad_input(field, "has NaN or infinite values")
