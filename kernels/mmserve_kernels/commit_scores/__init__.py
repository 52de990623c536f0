"""What a commit policy asks of logits, in one pass over them: the best tokens, how sure they are, and drawn ones."""

from mmserve_kernels.commit_scores.reference import commit_scores
from mmserve_kernels.commit_scores.types import CommitScores, Draw

__all__ = ["CommitScores", "Draw", "commit_scores"]
