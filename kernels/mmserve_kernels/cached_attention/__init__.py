"""Attention of a ragged batch of query rows over paged keys and values."""

from mmserve_kernels.cached_attention.reference import Ragged, cached_attention

__all__ = ["Ragged", "cached_attention"]
