"""Attention that looks only at chosen blocks of keys and values, and what chooses them."""

from mmserve_kernels.sparse_attention.builders import Rows, query_aware, sink_and_window, vertical_slash
from mmserve_kernels.sparse_attention.index import BlockIndex, block_index
from mmserve_kernels.sparse_attention.pages import best_pages, page_bounds
from mmserve_kernels.sparse_attention.reference import sparse_attention

__all__ = [
    "BlockIndex",
    "Rows",
    "best_pages",
    "block_index",
    "page_bounds",
    "query_aware",
    "sink_and_window",
    "sparse_attention",
    "vertical_slash",
]
