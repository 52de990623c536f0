"""Commit policies: their names, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmserve.core.values import ABOVE_0, NUMBER, SHARE, SHARE_ABOVE_0, at_least, at_most_bytes, value, within


@dataclass(frozen=True)
class Threshold:
    """Every candidate at least this confident becomes final (arXiv 2505.22618)."""

    confidence: float = value(0.9, ABOVE_0, "least probability of a candidate; more than 1 = one token a step")


@dataclass(frozen=True)
class Factor:
    """The n most confident, n the largest with the n-th at least ``1 - factor / (n + 1)`` (arXiv 2505.22618)."""

    factor: float = value(1.0, ABOVE_0, "how much confidence may fall with n")


@dataclass(frozen=True)
class Confident:
    """All candidates more confident than this, or else as many as reach the schedule's time grid (arXiv 2505.16990)."""

    confidence: float = value(0.95, SHARE_ABOVE_0, "probability that a candidate must exceed")


@dataclass(frozen=True)
class EntropyBound:
    """The most of lowest entropy whose entropies, but for the largest, sum to at most ``bound`` (arXiv 2505.24857)."""

    bound: float = value(0.1, at_least(0), "in nats")


@dataclass(frozen=True)
class Learned:
    """What a filter trained for the model trusts, and as many as the schedule requires (Learn2PD, arXiv 2509.25188)."""

    threshold: float = value(0.96, ABOVE_0, "trust that a candidate must exceed; 1 or more = the schedule alone")
    end_of_text: bool = value(True, meaning="an accepted end of text settles everything right of it (EoTP)")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Commit confident candidates, and replace committed tokens of the current block by more confident ones
    (LLaDA2.1)."""

    confidence: float = value(0.95, ABOVE_0, "probability that a candidate must exceed")
    edit_confidence: float = value(0.9, ABOVE_0, "probability that a replacement must exceed")
    passes: int = value(16, within(0, 64), "most passes over a block after it is full")


@dataclass(frozen=True, kw_only=True)
class Ngram:
    """Prompt-lookup speculation for autoregressive models. Greedy, the answer is the same, in fewer passes, but for
    ties in the last bits of logits."""

    length: int = value(8, within(1, 64), "tokens of a draft")
    longest: int = value(4, within(1, 16), "last tokens to look up, at most")
    shortest: int = value(2, within(1, 16), "last tokens to look up, at least")


@dataclass(frozen=True)
class Guided:
    """The server's companion of the model judges the drafted block from left to right (arXiv 2505.21467)."""

    top_k: int = value(0, at_least(0), "drafted tokens are kept that are among so many likeliest; 0 = its own choice")
    ratio: float = value(0.5, SHARE, "with top_k: least probability of a kept token, as a share of the likeliest's")


@dataclass(frozen=True)
class DraftModel:
    """Speculation for autoregressive models: the server's companion of the model drafts (arXiv 2211.17192). Greedy, the
    answer is the same, in fewer passes, but for ties in the last bits of logits."""

    length: int = value(4, within(1, 64), "tokens of a draft")


@dataclass(frozen=True)
class Scheduler:
    """The discrete scheduler that the server's configuration has under ``[schedulers.NAME]``."""

    name: str = value(meaning="NAME of the scheduler")


@dataclass(frozen=True, kw_only=True)
class EarlyCommit:
    """What is left is committed at once when the model is sure of the answer (Prophet, arXiv 2508.19982).

    Sure: the two highest logits lie at least ``early`` (later ``middle``, ``late``) apart on average over the answer's
    positions, final ones that a pass runs included. ``base``: what is committed until then, ``low_confidence`` where
    none is named; a name or a policy with numbers.
    """

    early: float = value(7.5, NUMBER, "gap of logits in the first 33% of the steps")
    middle: float = value(5.0, NUMBER, "gap from 33% on")
    late: float = value(2.5, NUMBER, "gap from 67% on")
    mistakes: float = value(0.0, at_least(0), "above 0: sure instead when no more tokens are expected to be wrong")
    answer_start: int = value(0, at_least(0), "first position of the answer")
    answer_length: int = value(0, at_least(0), "positions of the answer; 0 = the current block")
    answer_after: str = value("", at_most_bytes(256), "the answer begins after this text", shown="none")
    base: BaseCommit | None = None


BaseCommit = (
    Literal["low_confidence", "random", "threshold", "factor", "confident", "entropy_bound", "learned"]
    | Threshold
    | Factor
    | Confident
    | EntropyBound
    | Learned
)
Commit = (
    BaseCommit
    | Literal["early_commit", "edit", "ngram", "guided", "draft_model"]
    | EarlyCommit
    | Edit
    | Ngram
    | Guided
    | DraftModel
    | Scheduler
)

__all__ = [
    "Confident",
    "DraftModel",
    "EarlyCommit",
    "Edit",
    "EntropyBound",
    "Factor",
    "Guided",
    "Learned",
    "Ngram",
    "Scheduler",
    "Threshold",
]
