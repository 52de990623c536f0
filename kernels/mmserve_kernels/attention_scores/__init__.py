"""How much attention each position gets from all rows of a request: what pruning of tokens asks."""

from mmserve_kernels.attention_scores.reference import attention_scores

__all__ = ["attention_scores"]
