"""Rotary embedding of new queries and keys, and the write of new keys and values into pages."""

from mmserve_kernels.rope_scatter.reference import by_axis, rope_scatter, rotate

__all__ = ["by_axis", "rope_scatter", "rotate"]
