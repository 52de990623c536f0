"""Commit policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.core.tuning import ACCOMPANIED, DRAFTING, UNPENALISED
from mmserve.decode.commit.base import Candidates, Commit
from mmserve.decode.commit.confident import Confident
from mmserve.decode.commit.draft_model import DraftModel
from mmserve.decode.commit.early_commit import EarlyCommit
from mmserve.decode.commit.edit import Edit
from mmserve.decode.commit.entropy_bound import EntropyBound
from mmserve.decode.commit.factor import Factor
from mmserve.decode.commit.guided import Guided
from mmserve.decode.commit.learned import Learned
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.commit.ngram import Ngram
from mmserve.decode.commit.random import Random
from mmserve.decode.commit.threshold import Threshold

COMMIT: dict[str, Callable[..., Commit]] = {
    "low_confidence": LowConfidence,
    "random": Random,
    "threshold": Threshold,
    "factor": Factor,
    "early_commit": EarlyCommit,
    "confident": Confident,
    "entropy_bound": EntropyBound,
    "edit": Edit,
    "learned": Learned,
    "ngram": Ngram,
    "guided": Guided,
    "draft_model": DraftModel,
}
#: ``scheduler`` (``scheduled.py``) is not in this table: it is created from the server's configuration
#: (``decode/policies.py``).
#: Commit policies for masked diffusion, and for next-token models; the first is the default.
DIFFUSION_COMMIT = (
    "low_confidence",
    "random",
    "threshold",
    "factor",
    "early_commit",
    "confident",
    "entropy_bound",
    "edit",
    "guided",
    "learned",
)
#: A next-token model commits one token in each step, whatever its confidence, unless it verifies a draft.
CAUSAL_COMMIT = ("low_confidence", "threshold", "ngram", "draft_model")
#: Where open positions hold random tokens, each step accepts some and redraws the rest (``decode/uniform_state``).
RENOISING_COMMIT = ("entropy_bound",)
#: Policies that need a filter trained for the model; models without a filter do not offer them.
FILTERED = frozenset({"learned"})

__all__ = [
    "ACCOMPANIED",
    "CAUSAL_COMMIT",
    "COMMIT",
    "DIFFUSION_COMMIT",
    "DRAFTING",
    "FILTERED",
    "RENOISING_COMMIT",
    "UNPENALISED",
    "Candidates",
    "Commit",
]
