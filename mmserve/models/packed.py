"""Linear layers with weights prepacked for oneDNN, PyTorch's matrix library on CPUs.

A plain layer's weights are reordered for every product, or multiplied by another library. Packed ones were measured 1.2
to 4 times faster at 1 to 64 rows (AVX-512, one thread: 32,000 × 288 at one row 5.0 ms plain and 2.6 packed in fp32, 3.7
and 1.3 in bf16), and the bits of a row do not depend on the number of rows, from 1 or 2 on (see ``row_floor`` in
``decode/forward.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mmserve_kernels.few_rows import MOST_ROWS, blocks_of, few_rows, part_of
from torch import Tensor, nn

#: Number of rows for which the layout is optimised. One layout serves all numbers of rows.
_EXPECTED_ROWS = 16
#: Minimum rows of oneDNN's products, because 4 rows take less time than 1 or 2: all products of a 15 M LLaMA in fp32
#: (AVX-512, one thread) 4.6 to 5.1 ms for 4 to 6 rows, 6.0 and 6.2 for 1 and 2; in bf16 3.1, and 3.3 and 3.5.
FEWEST_ROWS = 4
#: By width and columns of layers: the partial sums with which ``few_rows`` has oneDNN's bits; None = there are none.
_parts: dict[tuple[int, int], int | None] = {}


class LinearForm(nn.Module):
    """A linear layer for inference in another form than ``nn.Linear``; copies and checkpoints use the plain form."""

    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` in plain order: a copy, computed at each access."""
        raise NotImplementedError

    def plain(self) -> nn.Linear:
        """The same layer as ``nn.Linear``, with its own weights."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=False)
        return linear.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """The plain layer: copies are for changing weights, and must be packed again for serving."""
        return self.plain()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As ``nn.Linear``: checkpoints contain no packed weights."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


class Product(LinearForm):
    """A form with its own product."""

    has_few_rows: bool  # whether few rows are faster than ``FEWEST_ROWS``


class PackedLinear(Product):
    """``nn.Linear`` for inference on a CPU, with only the packed weights.

    On one thread, few rows use a loop with the same bits as oneDNN's product, if there is one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _EXPECTED_ROWS)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        #: Weights for ``few_rows``: their blocks, and its partial sums; None = not supported.
        self.few: tuple[np.ndarray, int] | None = None
        blocks, kind = blocks_of(packed, self.in_features, self.out_features), (self.in_features, self.out_features)
        if blocks is not None:
            if kind not in _parts:
                _parts[kind] = part_of(packed, blocks, *kind)
            part = _parts[kind]
            self.few = None if part is None else (blocks, part)
        self.has_few_rows = self.few is not None

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` in plain order: a copy, computed at each access."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if self.few is not None and x.numel() <= MOST_ROWS * self.in_features and torch.get_num_threads() == 1:
            summed = few_rows(x, *self.few, self.out_features)
            return summed if self.bias is None else summed + self.bias
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return made


class JointLinear(nn.Module):
    """Linear layers with the same input as one product: fewer calls, with more columns each."""

    def __init__(self, linears: Sequence[nn.Linear], made: Callable[[nn.Linear], Product]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        with torch.device("meta"):
            joined = nn.Linear(linears[0].in_features, sum(self.sizes), bias=linears[0].bias is not None)
        joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
        if joined.bias is not None:
            joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
        self.product = made(joined)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The result of each layer: views of one tensor."""
        return torch.split(self.product(x), self.sizes, -1)

    def parts(self) -> list[PartLinear]:
        """The individual layers."""
        return [PartLinear(self, index) for index in range(len(self.sizes))]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: the parts are copied as plain layers, and must be joined again for serving."""

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Empty: the parts save themselves."""
        return {} if destination is None else destination


class PartLinear(LinearForm):
    """One layer of a ``JointLinear``. It computes the whole product: to get several, call the joint layer."""

    def __init__(self, joint: JointLinear, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = joint.product.in_features, joint.sizes[index]
        self._joint = (joint,)  # in a tuple, so that it is no submodule: its weights count once
        self._index = index
        start = sum(joint.sizes[:index])
        self._rows = slice(start, start + self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` in plain order: a copy, computed at each access."""
        return self._joint[0].product.weight[self._rows].clone()

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias ``[out]``, if the layers have one."""
        bias: Tensor | None = self._joint[0].product.bias
        return None if bias is None else bias[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = self._joint[0](x)
        return parts[self._index]


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype can be packed on ``device``."""
    ops = torch.ops.mkldnn
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Replace the linear layers in ``module`` by packed ones, if possible.

    Weights that an embedding shares stay for the embedding: a tied output layer becomes a copy.
    """
    replace_linears(module, PackedLinear, lambda linear: packs(linear.weight.dtype, linear.weight.device))


def replace_linears(
    module: nn.Module, made: Callable[[nn.Linear], Product], taken: Callable[[nn.Linear], bool]
) -> None:
    """Replace the linear layers in ``module`` for which ``taken`` is true by the results of ``made``.

    One after another, freeing the plain weights of each, so that memory grows by at most one layer. Layers that a
    module lists in its ``joined`` (name of the joint layer: names of its parts) become one ``JointLinear``.
    """
    for parent in list(module.modules()):
        for joint, names in getattr(parent, "joined", {}).items():
            parts = [getattr(parent, name, None) for name in names]
            plain = [p for p in parts if type(p) is nn.Linear and taken(p)]
            if len(plain) < len(names):
                continue
            together = JointLinear(plain, made)
            setattr(parent, joint, together)
            for name, part in zip(names, together.parts(), strict=True):
                setattr(parent, name, part)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and taken(child):
                setattr(parent, name, made(child))


def has_few_rows(module: nn.Module) -> bool:
    """Whether few rows are faster than more in every linear layer in ``module``."""
    return all(not isinstance(m, nn.Linear) and m.has_few_rows for m in linears(module))


def count_weights(module: nn.Module) -> int:
    """Number of parameters in ``module``, packed or not; shared ones count once."""
    found: dict[int, int] = {}
    for each in module.modules():
        packed = each.in_features * each.out_features if isinstance(each, Product) else 0
        found |= {id(p): packed if packed and p.ndim != 1 else p.numel() for p in each.parameters(recurse=False)}
    return sum(found.values())


def linears(module: nn.Module) -> list[nn.Linear | Product]:
    """The linear layers in ``module``, packed or not, in order."""
    return [m for m in module.modules() if isinstance(m, nn.Linear | Product)]
