"""Linear layers with 4-bit weights in groups, for inference on a CPU (``dtype = "int4"``).

Weight-only quantisation: each group of 32 weights of an output channel has its own scale and midpoint (round to nearest
between the group's minimum and maximum); rows are multiplied as bf16, with sums in fp32, by PyTorch's own kernel, which
unpacks in registers. A row's bits do not depend on the number of rows. Results are rounded to bf16, so the output layer
has 8 bits (``QuantizedLinear``): rounded logits would have many ties.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.models.packed import Product

#: Its name in configuration files.
INT4 = "int4"
#: Group size: the minimum that the kernel supports.
GROUP = 32
#: Channel block size of the kernel.
_CHANNELS = 16
_LEVELS, _MIDDLE = 15, 8


class FourBitLinear(Product):
    """``nn.Linear`` for inference on a CPU, fp32 in and out, with 4-bit weights. Dimensions are padded with zeros."""

    groups: Tensor
    has_few_rows = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._more = -linear.in_features % GROUP
        weight = F.pad(linear.weight.detach().float(), (0, self._more, 0, -linear.out_features % _CHANNELS))
        grouped = weight.unflatten(1, (-1, GROUP))  # [N, G, GROUP]
        low, high = grouped.amin(2), grouped.amax(2)
        scales = ((high - low) / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
        middles = (low + _MIDDLE * scales.float()).bfloat16()
        codes = ((grouped - middles.float()[..., None]) / scales.float()[..., None]).round_() + _MIDDLE
        codes = codes.clamp_(0, _LEVELS).flatten(1).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("groups", torch.stack((scales.T, middles.T), 2).contiguous())  # [G, N, 2]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` as fp32: a copy, computed at each access."""
        # The kernel's weight layout is opaque, so weights are recovered by products with unit rows. Each result has
        # only one nonzero term, whose scale and midpoint are applied afterwards, so that nothing is rounded.
        width = self.in_features + self._more
        plain = torch.stack((torch.ones_like(self.groups[..., 0]), torch.zeros_like(self.groups[..., 0])), 2)
        rows = torch.eye(width, dtype=torch.bfloat16)
        codes = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, plain.contiguous()).float()
        scales, middles = (self.groups[..., i].float().repeat_interleave(GROUP, 0) for i in (0, 1))
        return (codes * scales + middles)[: self.in_features, : self.out_features].T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        rows = F.pad(rows, (0, self._more)) if self._more else rows.contiguous()
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.groups)
        made = made[:, : self.out_features].float()
        if self.bias is not None:
            made = made.add_(self.bias)
        return made.view(*x.shape[:-1], self.out_features)


def why_no_four_bits(device: torch.device) -> str:
    """The reason why 4-bit weights are not supported on ``device``; empty if they are."""
    if device.type != "cpu":
        return f"they are multiplied on a CPU, not on {device.type}"
    ops = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return "" if all(hasattr(torch.ops.aten, op) for op in ops) else "this PyTorch has no such product"
