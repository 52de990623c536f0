"""Inputs of commit policies from one pass over logits: top-k tokens, their confidence, and sampled tokens."""

from mmserve_kernels.commit_scores.reference import commit_scores
from mmserve_kernels.commit_scores.types import CommitScores, Draw

__all__ = ["CommitScores", "Draw", "commit_scores"]
