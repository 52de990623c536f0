"""Modules that are made without numbers, for a checkpoint to fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: Draws of random numbers.
_DRAWS = {nn.init.normal_, nn.init.trunc_normal_, torch.Tensor.normal_}


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules made within it are on "meta": their tensors have shapes and dtypes, but no numbers."""
    with torch.device("meta"), _Shapes():
        yield


class _Shapes(TorchFunctionMode):
    """What PyTorch does on "meta" in Python, with its compiler and SymPy imported for it (2.4 s), is done without them.

    A tensor without numbers stays as it is where numbers are drawn for it, and a range is made on the CPU first.
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
