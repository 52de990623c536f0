"""Compression of K/V for the transfer to another store: CacheGen (arXiv 2310.07240, section 5).

Values of neighbouring tokens are similar, so the first token of each page is quantized to 8 bits a value and the others
as differences from it, to ``bits`` in the first third of the layers, one bit less in the second and two less in the
last: later layers are less sensitive. The integers, channel by channel, are entropy-coded with zlib (Huffman coding).
Each page has a scale for each head, so the result does not depend on how a prompt was divided into parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmserve.core.payloads import KVChunk, KVState, PrefilledPayload
from mmserve.errors import TransferError

#: Dtypes that are compressed, by name; other tensors (of a quantized store) are sent unchanged.
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
#: Bits of a page's first token, and the minimum for a difference.
_FIRST_BITS, _LEAST_BITS = 8, 2


@dataclass(frozen=True)
class CodedTensor:
    """Compressed keys or values of a layer ``[pages, page_size, heads, dim]``, with ``bits`` a difference."""

    shape: tuple[int, ...]
    dtype: str
    bits: int
    scales: np.ndarray  # float32 [2, pages, heads]: of first tokens, of differences
    data: np.ndarray  # uint8: the entropy-coded integers


def bits_of(layer: int, layers: int, bits: int) -> int:
    """Bits of a difference in ``layer`` of ``layers``."""
    return max(_LEAST_BITS, bits - 3 * layer // layers)


def coded(payload: Any, bits: int, layers: int) -> Any:
    """``payload`` with its K/V compressed to ``bits``; payloads without K/V are returned unchanged.

    ``layers``: number of layers of the model.
    """
    if isinstance(payload, PrefilledPayload):
        return replace(payload, kv=coded(payload.kv, bits, layers))
    if not isinstance(payload, KVState | KVChunk):
        return payload
    tensors = {
        name: _coded(tensor, payload.positions, bits_of(int(name.split(".")[1]), layers, bits))
        if name.count(".") == 1 and str(tensor.dtype) in _DTYPES
        else tensor
        for name, tensor in payload.tensors.items()
    }
    return replace(payload, tensors=tensors)


def decoded(payload: Any) -> Any:
    """The lossy inverse of ``coded``; uncompressed payloads are returned unchanged. Raises ``TransferError``."""
    if isinstance(payload, PrefilledPayload):
        return replace(payload, kv=decoded(payload.kv))
    if not isinstance(payload, KVState | KVChunk):
        return payload
    if not any(isinstance(each, CodedTensor) for each in payload.tensors.values()):
        return payload
    return replace(payload, tensors=_all_decoded(payload.tensors))


def _all_decoded(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        return {name: _decoded(each) if isinstance(each, CodedTensor) else each for name, each in tensors.items()}
    except (zlib.error, ValueError, KeyError, RuntimeError) as error:
        raise TransferError(f"coded K/V cannot be read: {error}") from error


@torch.inference_mode()
def _coded(x_PSHD: Tensor, positions: int, bits: int) -> CodedTensor:
    """``positions``: number of used positions, from the first."""
    pages, size, _heads, _dim = x_PSHD.shape
    x = x_PSHD.float().cpu()
    filled = (torch.arange(pages * size) < positions).view(pages, size, 1, 1)
    x = torch.where(filled, x, torch.zeros(()))
    first, first_scale = _rounded(x[:, :1], _FIRST_BITS)
    rest, rest_scale = _rounded(torch.where(filled[:, 1:], x[:, 1:] - first * first_scale, torch.zeros(())), bits)
    numbers = torch.cat([first, rest], 1).to(torch.int8).permute(2, 3, 0, 1).contiguous().numpy()
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    data = coder.compress(numbers.data) + coder.flush()
    scales = torch.stack([first_scale, rest_scale]).flatten(3).squeeze(2).squeeze(-1).numpy()
    return CodedTensor(tuple(x_PSHD.shape), str(x_PSHD.dtype), bits, scales, np.frombuffer(bytearray(data), np.uint8))


@torch.inference_mode()
def _decoded(coded: CodedTensor) -> Tensor:
    pages, size, heads, dim = coded.shape
    count = pages * size * heads * dim
    coder = zlib.decompressobj(-15)
    data = coder.decompress(coded.data.tobytes(), count)
    if len(data) != count or not coder.eof:
        raise ValueError(f"{len(data)} numbers came for {count}")
    numbers = torch.frombuffer(bytearray(data), dtype=torch.int8).view(heads, dim, pages, size).permute(2, 3, 0, 1)
    scales = torch.from_numpy(np.array(coded.scales)).view(2, pages, 1, heads, 1)
    first = numbers[:, :1] * scales[0]
    return torch.cat([first, first + numbers[:, 1:] * scales[1]], 1).to(_DTYPES[coded.dtype])


def _rounded(x_PSHD: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Signed integers of ``bits``, and the scale ``[pages, 1, heads, 1]`` that restores ``x``."""
    most = (1 << (bits - 1)) - 1
    if not x_PSHD.shape[1]:  # pages of one token
        return x_PSHD, x_PSHD.new_zeros(x_PSHD.shape[0], 1, x_PSHD.shape[2], 1)
    scale = x_PSHD.abs().amax((1, 3), keepdim=True) / most
    return (x_PSHD / scale.clamp_min(torch.finfo(torch.float32).tiny)).round(), scale
