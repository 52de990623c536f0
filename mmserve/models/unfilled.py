"""Creates modules without initialising their parameters, for a checkpoint to fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: Functions that draw random numbers.
_DRAWS = {nn.init.normal_, nn.init.trunc_normal_, torch.Tensor.normal_}


@contextmanager
def unfilled() -> Iterator[None]:
    """Context in which modules are created on "meta": tensors with shapes and dtypes, but without data."""
    with torch.device("meta"), _Shapes():
        yield


class _Shapes(TorchFunctionMode):
    """Avoids PyTorch's Python implementations on "meta", which import its compiler and SymPy (2.4 s).

    Random initialisation of a tensor without data is skipped, and a range is created on the CPU first.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func is torch.arange and kwargs.get("device") is None:
            return torch.empty_like(func(*args, **kwargs | {"device": "cpu"}), device="meta")
        return func(*args, **kwargs)
