"""Serialization of payloads between stages: a fixed header, followed by a safetensors file.

The header is ``MMST``, the version of this layout (uint32), the XXH3 hash (uint64) of the rest and its length (uint64),
all little-endian, padded to 64 bytes. The safetensors file holds every array and tensor; its metadata contains the kind
of payload, the version of that kind, and all numbers and texts as JSON. Nothing is pickled; only dataclasses of a fixed
table are created.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from mmserve.errors import TransferError
from mmserve.transfer.tensor_file import TensorFile, read

_HEAD = struct.Struct("<4sIQQ40x")
_MAGIC = b"MMST"
#: Used bytes of the header.
_USED = struct.calcsize("<4sIQQ")
#: The version of the byte layout; each kind of payload has a separate one (``Kinds.versions``).
LAYOUT = 2
#: Keys of the safetensors metadata.
_KIND, _VERSION, _BODY = "mmserve.kind", "mmserve.version", "mmserve.body"


class Kinds:
    """The dataclasses that can be serialized: ``payloads`` with their versions, and the ``parts`` that they contain.

    Tensors of ``views`` are views of the decoded bytes, for receivers that copy them; others own their memory.
    """

    def __init__(self, payloads: Mapping[type, int], parts: tuple[type, ...], views: tuple[type, ...] = ()) -> None:
        self._versions = {kind.__name__: version for kind, version in payloads.items()}
        self._classes = {kind.__name__: kind for kind in (*payloads, *parts)}
        self._views = views
        wrong = [name for name, kind in self._classes.items() if not is_dataclass(kind)]
        if wrong or len(self._classes) != len(payloads) + len(parts):
            raise ValueError(f"payloads are dataclasses with names of their own, not {wrong or sorted(self._classes)}")

    def pack(self, payload: Any) -> Packed:
        """A payload, ready to be written. Raises ``TypeError`` for types that are not in the table."""
        name = type(payload).__name__
        if name not in self._versions:
            raise TypeError(f"{name} is no payload")
        tensors: dict[str, Tensor] = {}
        body = json.dumps(self._plain(payload, tensors), separators=(",", ":"))
        return Packed(TensorFile(tensors, {_KIND: name, _VERSION: str(self._versions[name]), _BODY: body}))

    def encode(self, payload: Any) -> bytes:
        """The bytes of a payload; raises as ``pack``."""
        packed = self.pack(payload)
        data = bytearray(packed.size)
        packed.write(memoryview(data))
        return bytes(data)

    def decode(self, data: bytes | bytearray | memoryview, device: torch.device | str = "cpu") -> Any:
        """The payload in ``data``, with tensors on ``device``. Those of ``views`` may be views of ``data``.

        Raises ``TransferError`` for damaged or truncated bytes, and for unknown versions and kinds.
        """
        view = memoryview(data)
        rest = _checked(memoryview(bytearray(view)) if view.readonly else view)
        try:
            tensors, meta = read(rest)
            name, version, body = meta[_KIND], int(meta[_VERSION]), json.loads(meta[_BODY])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TransferError(f"the bytes of a payload cannot be read: {error}") from error
        known = self._versions.get(name)
        if known != version:
            has = f"knows version {known}" if known is not None else "does not know it"
            raise TransferError(f"a payload is of kind {name!r}, version {version}; this server {has}")
        try:
            payload = self._built(body, tensors, torch.device(device))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise TransferError(f"the fields of a payload of kind {name!r} cannot be read: {error!r}") from error
        if type(payload).__name__ != name:
            raise TransferError(f"a payload is labelled {name!r} and holds {type(payload).__name__!r}")
        return payload

    def _plain(self, value: Any, tensors: dict[str, Tensor]) -> Any:
        """``value`` as JSON, with its arrays added to ``tensors``. Types without a JSON form become an object of one
        key."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            items = [self._plain(item, tensors) for item in value]
            return items if isinstance(value, tuple) else {"list": items}
        if isinstance(value, (np.ndarray, Tensor)):
            key, of_numpy = f"{len(tensors)}", isinstance(value, np.ndarray)
            tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            tensors[key] = tensor
            return {"array" if of_numpy else "tensor": key}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, Mapping):
            return {"map": [[self._plain(k, tensors), self._plain(v, tensors)] for k, v in value.items()]}
        name = type(value).__name__
        kind = self._classes.get(name)
        if kind is None or kind is not type(value):
            raise TypeError(f"{type(value).__qualname__} is no plain data")
        named = [field.name for field in fields(kind) if field.init]
        found = {field: self._plain(getattr(value, field), tensors) for field in named}
        return {"is": name, "of": found}

    def _built(self, plain: Any, tensors: Mapping[str, Tensor], device: torch.device, *, view: bool = False) -> Any:
        def built(item: Any) -> Any:
            return self._built(item, tensors, device, view=view)

        if isinstance(plain, list):
            return tuple(built(item) for item in plain)
        if not isinstance(plain, dict):
            return plain
        match plain:
            case {"is": str(name), "of": dict(of)}:
                kind = self._classes[name]
                view = view or kind in self._views
                return kind(**{key: built(item) for key, item in of.items()})
            case {"array": str(key)}:
                return tensors[key].clone().numpy()
            case {"tensor": str(key)}:
                return tensors[key].to(device, copy=not view)
            case {"list": list(items)}:
                return [built(item) for item in items]
            case {"bytes": str(text)}:
                return bytes.fromhex(text)
            case {"map": list(pairs)}:
                return {built(k): built(v) for k, v in pairs}
        raise ValueError(f"no value has the form {sorted(plain)}")


class Packed:
    """A serialized payload that is not written yet; ``size`` in bytes."""

    def __init__(self, file: TensorFile) -> None:
        self._file, self.size = file, _HEAD.size + file.size

    def write(self, buffer: memoryview) -> None:
        """Write the payload into ``buffer`` of ``size`` bytes."""
        rest = buffer[_HEAD.size : self.size]
        self._file.write(rest)
        _HEAD.pack_into(buffer, 0, _MAGIC, LAYOUT, xxhash.xxh3_64_intdigest(rest), len(rest))


def _checked(data: memoryview) -> memoryview:
    """The data after the header; raises ``TransferError`` if it is damaged."""
    if len(data) < _HEAD.size:
        raise TransferError(f"the bytes of a payload end within their head, after {len(data)} bytes")
    magic, layout, checksum, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise TransferError("these are not the bytes of a payload")
    if layout != LAYOUT:
        raise TransferError(f"a payload has layout version {layout}; this server knows version {LAYOUT}")
    rest = data[_HEAD.size :]
    if len(rest) != length:
        raise TransferError(f"a payload of {length} bytes came as {len(rest)}")
    if xxhash.xxh3_64_intdigest(rest) != checksum or any(data[_USED : _HEAD.size]):
        raise TransferError("the bytes of a payload were damaged: their checksum differs")
    return rest
