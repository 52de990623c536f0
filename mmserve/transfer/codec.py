"""The byte form of what travels between stages: a fixed head, then a safetensors file.

The head is ``MMST``, the version of this layout (uint16), the CRC-32 of what follows (uint32) and its length (uint64),
all little-endian. The safetensors file holds every array and tensor; its metadata names the kind of payload, the
version of that, and all numbers and texts as JSON. Nothing is pickled; only dataclasses of one table can be named.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mmserve.errors import TransferError

_HEAD = struct.Struct("<4sHIQ")
_MAGIC = b"MMST"
#: The version of the layout of bytes; each kind of payload has one of its own (``Kinds.versions``).
LAYOUT = 1
#: Keys of the safetensors metadata.
_KIND, _VERSION, _BODY = "mmserve.kind", "mmserve.version", "mmserve.body"


class Kinds:
    """The plain dataclasses that can travel: ``payloads`` with their versions, and the ``parts`` that they have."""

    def __init__(self, payloads: Mapping[type, int], parts: tuple[type, ...]) -> None:
        self._versions = {kind.__name__: version for kind, version in payloads.items()}
        self._classes = {kind.__name__: kind for kind in (*payloads, *parts)}
        wrong = [name for name, kind in self._classes.items() if not is_dataclass(kind)]
        if wrong or len(self._classes) != len(payloads) + len(parts):
            raise ValueError(f"payloads are dataclasses with names of their own, not {wrong or sorted(self._classes)}")

    def encode(self, payload: Any) -> bytes:
        """The bytes of one of the payloads. ``TypeError`` for what is no plain data of the table."""
        name = type(payload).__name__
        if name not in self._versions:
            raise TypeError(f"{name} is no payload")
        tensors: dict[str, Tensor] = {}
        body = json.dumps(self._plain(payload, tensors), separators=(",", ":"))
        meta = {_KIND: name, _VERSION: str(self._versions[name]), _BODY: body}
        rest = safetensors.torch.save(tensors, meta)
        return _HEAD.pack(_MAGIC, LAYOUT, zlib.crc32(rest), len(rest)) + rest

    def decode(self, data: bytes, device: torch.device | str = "cpu") -> Any:
        """The payload of ``data``; its tensors are on ``device``.

        Raises ``TransferError`` for bytes that are damaged or cut short, and for versions and kinds that are not known.
        """
        rest = _checked(data)
        try:
            size = int.from_bytes(rest[:8], "little")
            meta = json.loads(rest[8 : 8 + size])["__metadata__"]
            name, version, body = meta[_KIND], int(meta[_VERSION]), json.loads(meta[_BODY])
            tensors = safetensors.torch.load(rest)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise TransferError(f"the bytes of a payload cannot be read: {error}") from error
        known = self._versions.get(name)
        if known != version:
            has = f"knows version {known}" if known is not None else "does not know it"
            raise TransferError(f"a payload is of kind {name!r}, version {version}; this server {has}")
        try:
            payload = self._built(body, lambda key: tensors[key], torch.device(device))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise TransferError(f"the fields of a payload of kind {name!r} cannot be read: {error!r}") from error
        if type(payload).__name__ != name:
            raise TransferError(f"a payload is said to be {name!r} and holds {type(payload).__name__!r}")
        return payload

    def _plain(self, value: Any, tensors: dict[str, Tensor]) -> Any:
        """``value`` as JSON, its arrays put into ``tensors``. What JSON has no form of is an object of one key."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            items = [self._plain(item, tensors) for item in value]
            return items if isinstance(value, tuple) else {"list": items}
        if isinstance(value, (np.ndarray, Tensor)):
            key, of_numpy = f"{len(tensors)}", isinstance(value, np.ndarray)
            tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            made = tensor.detach().contiguous()
            taken = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
            tensors[key] = made.clone() if made.untyped_storage().data_ptr() in taken else made  # none overlap
            return {"array" if of_numpy else "tensor": key}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, Mapping):
            return {"map": [[self._plain(k, tensors), self._plain(v, tensors)] for k, v in value.items()]}
        name = type(value).__name__
        if self._classes.get(name) is not type(value):
            raise TypeError(f"{type(value).__qualname__} is no plain data")
        named = [field.name for field in fields(self._classes[name]) if field.init]
        found = {field: self._plain(getattr(value, field), tensors) for field in named}
        return {"is": name, "of": found}

    def _built(self, plain: Any, tensor: Callable[[str], Tensor], device: torch.device) -> Any:
        if isinstance(plain, list):
            return tuple(self._built(item, tensor, device) for item in plain)
        if not isinstance(plain, dict):
            return plain
        match plain:
            case {"is": str(name), "of": dict(of)}:
                return self._classes[name](**{key: self._built(item, tensor, device) for key, item in of.items()})
            case {"array": str(key)}:
                return tensor(key).numpy()
            case {"tensor": str(key)}:
                return tensor(key).to(device)
            case {"list": list(items)}:
                return [self._built(item, tensor, device) for item in items]
            case {"bytes": str(text)}:
                return bytes.fromhex(text)
            case {"map": list(pairs)}:
                return {self._built(k, tensor, device): self._built(v, tensor, device) for k, v in pairs}
        raise ValueError(f"no value has the form {sorted(plain)}")


def _checked(data: bytes) -> bytes:
    """What follows the head, once it is known to be whole."""
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
    if zlib.crc32(rest) != checksum:
        raise TransferError("the bytes of a payload were damaged: their checksum differs")
    return rest
