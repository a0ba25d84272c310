"""Format of an embedding as a safetensors file, written and read without torch.

The tensor is named "embedding". The other fields of a reply are JSON, under "cornplug" in the file's
metadata.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cornplug.encoder_service.wire.messages import WireTensor

MEDIA_TYPE: Final = "application/vnd.safetensors"
_TENSOR: Final = "embedding"
_FIELDS: Final = "cornplug"
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Name of each dtype in safetensors, by torch's name."""
_ALIGNMENT_BYTES: Final = 8


def pack(fields: Mapping[str, Any], tensor: WireTensor) -> bytes:
    """Return the bytes of a file with the tensor and the other fields. The tensor's bytes are copied once."""
    header = msgspec.json.encode(
        {
            "__metadata__": {_FIELDS: msgspec.json.encode(fields).decode()},
            _TENSOR: {
                "dtype": _DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (0, len(tensor.data)),
            },
        }
    )
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    return b"".join((len(header).to_bytes(8, "little"), header, tensor.data))


def unpack(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the fields and the tensor's bytes of a file that `pack` returned.

    Raises LookupError, TypeError or ValueError (which includes msgspec's errors) if the file is invalid.
    """
    size = int.from_bytes(file[:8], "little")
    header = msgspec.json.decode(file[8 : 8 + size])
    fields: dict[str, Any] = msgspec.json.decode(header["__metadata__"][_FIELDS])
    start, end = header[_TENSOR]["data_offsets"]
    return fields, file[8 + size + start : 8 + size + end]
