"""Attention of a ragged batch of query rows over paged keys and values."""

from mmserve_kernels.cached_attention.reference import FixedBatch, Ragged, cached_attention

__all__ = ["FixedBatch", "Ragged", "cached_attention"]
