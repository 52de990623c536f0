"""The type of tensors within plain data."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A ``torch.Tensor``; ``core`` names no library of tensors, so that what only plans and waits need not load one.
Tensor: TypeAlias = Any
