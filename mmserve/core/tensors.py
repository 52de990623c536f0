"""The type of tensors in plain data."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A ``torch.Tensor``; ``core`` does not import torch, so that processes that only plan and wait need not load it.
Tensor: TypeAlias = Any
