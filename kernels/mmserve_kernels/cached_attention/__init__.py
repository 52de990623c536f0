"""Attention of a ragged batch of query rows over paged keys and values."""

from mmserve_kernels.cached_attention.batch import FixedBatch, Ragged

__all__ = ["FixedBatch", "Ragged"]
