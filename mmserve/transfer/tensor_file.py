"""Safetensors files written directly into existing memory and read in place, without intermediate copies.

The ``safetensors`` package creates files as new bytes, which costs two more copies of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

#: Names of the format's dtypes.
_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Alignment of tensors in bytes, for aligned vector loads.
_ALIGNMENT = 64
#: Prefix of the names of padding between tensors: the format allows no gaps.
_GAP = "gap of "


class TensorFile:
    """A file that is not written yet: ``tensors`` by name, and text metadata by key."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        self._at: dict[str, int] = {}
        end = 0
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _NAMES:
                raise TypeError(f"tensors of {tensor.dtype} do not travel")
            size = tensor.numel() * tensor.element_size()
            self._at[name] = end
            entries[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + size],
            }
            end += size
            gap = -end % _ALIGNMENT
            if gap:
                entries[f"{_GAP}{name}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
                end += gap
        head = json.dumps(entries, separators=(",", ":")).encode()
        self._head = head + b" " * (-(len(head) + 8) % _ALIGNMENT)
        self.size = 8 + len(self._head) + end

    def write(self, buffer: memoryview) -> None:
        """Write the whole file into ``buffer`` of ``size`` bytes."""
        begin = 8 + len(self._head)
        buffer[:8] = len(self._head).to_bytes(8, "little")
        buffer[8:begin] = self._head
        if begin == self.size:
            return
        rest = torch.frombuffer(buffer, dtype=torch.uint8)[begin:]
        for name, tensor in self._tensors.items():
            size = tensor.numel() * tensor.element_size()
            if size:
                target = rest[self._at[name] : self._at[name] + size]
                target.copy_(tensor.reshape(-1).view(torch.uint8))
        for name, at in self._at.items():  # zeroed, as the checksum covers the padding
            end = at + self._tensors[name].numel() * self._tensors[name].element_size()
            rest[end : end + (-end % _ALIGNMENT)] = 0


def read(buffer: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and metadata of the file in ``buffer``; tensors are views of it and keep it alive.

    Raises ``ValueError``, ``KeyError`` or ``TypeError`` for invalid files.
    """
    size = int.from_bytes(buffer[:8], "little")
    if not 0 < size <= len(buffer) - 8:
        raise ValueError(f"the head has {size} bytes of {len(buffer)}")
    entries = json.loads(bytes(buffer[8 : 8 + size]))
    metadata = entries.pop("__metadata__")
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if name.startswith(_GAP):
            continue
        dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
        begin, end = (8 + size + int(offset) for offset in entry["data_offsets"])
        count = 1
        for width in shape:
            count *= width
        if not 8 + size <= begin <= end <= len(buffer) or count * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name!r} lies outside of the file, or has another size than its shape")
        if not count:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            tensors[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin).view(shape)
    return tensors, metadata
