"""Weights quantised at load time to 8 bits (``dtype = "int8"``), or to 4 (``dtype = "int4"``, ``four_bits.py``).

8 bits: each output channel of a linear layer has a scale, and so has each input row, whose elements are quantised to
bytes, too: oneDNN multiplies and sums integers, which is exact, so a row's result does not depend on other rows or on
the implementation. Norms, rotary embedding, attention, K/V and the router of experts stay in fp32; embedding rows are
stored as bytes and converted to fp32. 4 bits: only the linear layers in a decoder's layers; its output layer and the
embedding then have 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from mmserve_kernels.byte_rows import ZERO, byte_rows
from torch import Tensor, nn

from mmserve.models.base import LoadedModel, Model
from mmserve.models.four_bits import INT4, FourBitLinear, why_no_four_bits
from mmserve.models.packed import Product, replace_linears
from mmserve.models.variations import ScaledEmbedding

#: Its name in configuration files.
INT8 = "int8"
#: Both kinds of load-time quantisation.
MADE = (INT8, INT4)
_MOST = 127


def _channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` as int8, and the scale (fp32 ``[N]``) of each row."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / _MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round_().clamp_(-_MOST, _MOST).to(torch.int8), scales


class QuantizedLinear(Product):
    """``nn.Linear`` for inference on a CPU, in fp32, with 8-bit weights prepacked for oneDNN."""

    scales: Tensor
    zeros: Tensor
    has_few_rows = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = _channels(linear.weight)
        self.packed = nn.Parameter(torch.ops.onednn.qlinear_prepack(weight, None), requires_grad=False)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(self.out_features, dtype=torch.int32))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` as fp32: a copy, computed at each access."""
        return self.packed.to_dense().t().float() * self.scales[:, None]

    def forward(self, x: Tensor) -> Tensor:
        rows, scales = byte_rows(x.reshape(-1, self.in_features))
        made: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        made = made.mul_(scales)
        if self.bias is not None:
            made = made.add_(self.bias)
        return made.view(*x.shape[:-1], self.out_features)


class QuantizedEmbedding(nn.Module):
    """``nn.Embedding`` for inference in fp32, with rows stored in 8 bits with a scale each."""

    scales: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._factor = embedding.scale if isinstance(embedding, ScaledEmbedding) else 1.0
        stored, scales = _channels(embedding.weight)
        self.stored = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scales", scales[:, None])

    @property
    def weight(self) -> Tensor:
        """All rows ``[V, D]`` as fp32: a copy, computed at each access."""
        return self.stored.float() * self.scales

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.stored[ids].float() * self.scales[ids]
        return rows if self._factor == 1.0 else rows * self._factor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight


def why_not(device: torch.device, kind: str = INT8) -> str:
    """The reason why weights of a ``kind`` of ``MADE`` are not supported on ``device``; empty if they are."""
    if kind == INT4 and (reason := why_no_four_bits(device)):
        return reason
    if device.type != "cpu":
        return f"they are multiplied on a CPU, not on {device.type}"
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")):
        return "this PyTorch has no oneDNN"
    weight = torch.full((16, 64), _MOST, dtype=torch.int8)
    rows, ones, zeros = torch.full((2, 64), 255, dtype=torch.uint8), torch.ones(16), torch.zeros(16, dtype=torch.int32)
    made = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, ZERO, torch.ops.onednn.qlinear_prepack(weight, None), ones, zeros, None, 1.0, 0, torch.float32,
        "none", [], "",
    )  # fmt: skip
    return "" if bool((made == 64 * _MOST * _MOST).all()) else "this processor's products of bytes overflow: no VNNI"


@torch.no_grad()
def quantize(module: nn.Module, kind: str = INT8) -> None:
    """Replace the linear layers and embeddings in ``module`` by quantised ones, one after another, so that memory grows
    by at most one layer. ``kind`` is one of ``MADE``; ``int4`` requires a ``Decoder``."""
    if kind == INT4:
        replace_linears(module.get_submodule("layers"), FourBitLinear, lambda linear: True)
    replace_linears(module, QuantizedLinear, lambda linear: True)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding):
                setattr(parent, name, QuantizedEmbedding(child))


def kind_of(model: Model) -> str:
    """The format of the served weights of ``model``, by its name in configuration files."""
    if isinstance(model, LoadedModel):
        kinds = {type(module) for module in model.decoder.modules()}
        for kind, name in ((FourBitLinear, INT4), (QuantizedLinear, INT8)):
            if kind in kinds:
                return name
    return str(model.dtype).removeprefix("torch.")


def stored_bytes(module: nn.Module) -> int:
    """Bytes of the weights in ``module`` as stored; shared ones count once."""
    tensors = {id(t): t for m in module.modules() for t in (*m.parameters(False), *m.buffers(False))}
    return sum(t.numel() * t.itemsize for t in tensors.values())
