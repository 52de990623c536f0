"""Linear layers with weights of 4 bits in groups, for inference on a CPU (``dtype = "int4"``).

Weight only: each group of 32 weights of an output channel has a scale and a middle of its own (round to nearest between
the least and the greatest of them), and rows are multiplied as bf16 with sums in fp32, by PyTorch's own kernel, which
unpacks in registers. A row's bits do not depend on the number of rows. Results are rounded to bf16, which is why the
output layer has 8 bits (``QuantizedLinear``): among rounded logits several would be the highest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.models.packed import Product

#: What configuration files call it.
INT4 = "int4"
#: Weights of a channel that share a scale: the fewest that the kernel takes.
GROUP = 32
#: The kernel's blocks of channels.
_CHANNELS = 16
_LEVELS, _MIDDLE = 15, 8


class FourBitLinear(Product):
    """``nn.Linear`` for inference on a CPU, fp32 in and out, with weights of 4 bits. Widths are filled with zeros."""

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
        """The weights ``[out, in]`` as fp32: a copy, made at each access."""
        # The order in which the kernel has its weights is its own: products with unit rows show them. Of each number
        # there is one term only, and its scale and middle are applied after, so that nothing is rounded.
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
    """Why weights of 4 bits are not served on ``device``; empty = they are."""
    if device.type != "cpu":
        return f"they are multiplied on a CPU, not on {device.type}"
    ops = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    return "" if all(hasattr(torch.ops.aten, op) for op in ops) else "this PyTorch has no such product"
