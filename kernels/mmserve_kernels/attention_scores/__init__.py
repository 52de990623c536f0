"""Attention received by each position from all rows of a request, for pruning of tokens."""

from mmserve_kernels.attention_scores.reference import attention_scores

__all__ = ["attention_scores"]
