"""Messages between the service and its replicas' processes: msgpack on socket pairs, and tensors in memfds.

    control   OpenModels, LoadModel, DropModel ──>  <── ReplicaReady | ReplicaFailed
    a lane    RunBatch ──>  <── BatchDone | ReplicaFailed          and two memfds: inputs, outputs

A memfd has no name, so only the service and the replica can open it. Its memory is freed when both have
ended.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import torch

from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.local_socket import encode_frame, receive_frame

_ALIGN_BYTES: Final = 64
_MAX_FRAME_BYTES: Final = 256 << 20


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Dtype, shape and location of a tensor in a lane's memfd."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class ModelSpec(msgspec.Struct, frozen=True):
    """Model to load: its folder, and the identity of its first modality."""

    path: str
    identity: bytes


class OpenModels(msgspec.Struct, frozen=True, tag="open"):
    """Request to load the first models, with the settings of the replica."""

    models: tuple[ModelSpec, ...]
    dtype: str
    device: str
    threads: int
    """Number of torch threads."""
    compile: bool


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """Request to load additional models."""

    models: tuple[ModelSpec, ...]


class DropModel(msgspec.Struct, frozen=True, tag="drop"):
    """Request to unload the models with these identities."""

    identities: tuple[bytes, ...]


class ReplicaReady(msgspec.Struct, frozen=True, tag="ready"):
    """Reply after models were loaded or unloaded."""

    identities: tuple[bytes, ...]
    """Identities of the loaded models."""
    problem: str = ""
    """Reason why a requested model is not loaded, or "" if all models are loaded."""


class ReplicaFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Reply to a request or a batch that failed."""

    kind: Literal["checkpoint", "absent", "error"]
    """Cause: "checkpoint" (no model could be loaded), "absent" (the replica does not have the model of a
    batch), or "error" (another exception)."""
    message: str


class MediaTensors(msgspec.Struct, frozen=True):
    """`TowerItem` whose tensors are in the lane's memfd, and its cached features or None."""

    tensors: tuple[SharedTensor, ...]
    tokens: int
    geometry: tuple[int, ...]
    features: SharedTensor | None


class RunBatch(msgspec.Struct, frozen=True, tag="run"):
    """Batch to compute, and its options (see `EncodeBatch`)."""

    media: tuple[MediaTensors, ...]
    wanted: tuple[tuple[bytes, int], ...]
    """Embeddings to compute, as pairs of (identity, index in `media`)."""
    keep: bool
    urgent: bool
    share: float


class BatchDone(msgspec.Struct, frozen=True, tag="done"):
    """Result of a batch, whose tensors are in the lane's output memfd."""

    embeddings: tuple[SharedTensor, ...]
    features: tuple[tuple[int, SharedTensor], ...]
    uncompiled: int
    """Number of towers of this replica that `--compile` could not compile so far."""


ToReplica = OpenModels | LoadModel | DropModel
FromReplica = ReplicaReady | ReplicaFailed
BatchReply = BatchDone | ReplicaFailed


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises OSError if the other side has disconnected."""
    sock.sendall(encode_frame(msgspec.msgpack.encode(message), limit=_MAX_FRAME_BYTES))


def receive(sock: socket.socket, kind: Any) -> Any:
    """Return the next message. Raises ConnectionResetError if the other side has disconnected, and
    TimeoutError after the socket's timeout.
    """
    return msgspec.msgpack.decode(receive_frame(sock, limit=_MAX_FRAME_BYTES), type=kind)


class SharedBuffer:
    """One process's mapping of a memfd that grows as needed. The service and its replica process write and
    read it alternately."""

    def __init__(self, fd: int) -> None:
        self.fd: Final = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def new(cls) -> SharedBuffer:
        return cls(os.memfd_create("cornplug-replica", os.MFD_CLOEXEC))

    def write(self, tensors: Sequence[torch.Tensor]) -> list[SharedTensor]:
        """Write tensors from any device one after another, and return their locations. The previous tensors
        are overwritten."""
        rows: list[SharedTensor] = []
        end = 0
        for tensor in tensors:
            offset = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            rows.append(SharedTensor(dtype_name(tensor.dtype), tuple(tensor.shape), offset))
            end = rows[-1].end
        if end > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, end)
        for row, tensor in zip(rows, tensors, strict=True):
            self.view(row).copy_(tensor)
        return rows

    def view(self, location: SharedTensor) -> torch.Tensor:
        """Return the tensor at a location, without a copy. The tensor is valid until the next `write` by
        either side."""
        count = math.prod(location.shape)
        if count == 0:
            return torch.empty(location.shape, dtype=location.torch_dtype)
        if self._map is None or len(self._map) < location.end:
            # Tensors in the previous mapping keep that mapping alive.
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        flat = torch.frombuffer(self._map, dtype=location.torch_dtype, count=count, offset=location.offset)
        return flat.reshape(location.shape)

    def close(self) -> None:
        """Close the descriptor. A mapping is freed with the last tensor that uses it."""
        os.close(self.fd)
