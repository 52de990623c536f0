"""Attention restricted to selected blocks of keys and values, and the index builders that select them."""

from mmserve_kernels.sparse_attention.index import BlockIndex, block_index
from mmserve_kernels.sparse_attention.reference import sparse_attention
from mmserve_kernels.sparse_attention.rows import Rows, sink_and_window

__all__ = ["BlockIndex", "Rows", "block_index", "sink_and_window", "sparse_attention"]
