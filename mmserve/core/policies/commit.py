"""Commit policies: their names and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmserve.core.values import ABOVE_0, NUMBER, SHARE, SHARE_ABOVE_0, at_least, at_most_bytes, value, within


@dataclass(frozen=True)
class Threshold:
    """Every candidate at least this confident becomes final (arXiv 2505.22618)."""

    confidence: float = value(0.9, ABOVE_0, "lowest probability of a candidate; more than 1 = one token a step")


@dataclass(frozen=True)
class Factor:
    """The n most confident, n the largest with the n-th at least ``1 - factor / (n + 1)`` (arXiv 2505.22618)."""

    factor: float = value(1.0, ABOVE_0, "how much the required confidence falls as n grows")


@dataclass(frozen=True)
class Confident:
    """All candidates more probable than this; if none is, as many as the schedule requires (arXiv 2505.16990)."""

    confidence: float = value(0.95, SHARE_ABOVE_0, "probability that a candidate must exceed")


@dataclass(frozen=True)
class EntropyBound:
    """The largest set of lowest entropies whose sum, without the largest, is at most ``bound`` (arXiv 2505.24857)."""

    bound: float = value(0.1, at_least(0), "bound on the sum of entropies, in nats")


@dataclass(frozen=True)
class Learned:
    """Candidates that a trained filter accepts, and at least as many as the schedule requires (Learn2PD, arXiv
    2509.25188)."""

    threshold: float = value(0.96, ABOVE_0, "filter score that a candidate must exceed; 1 or more = the schedule alone")
    end_of_text: bool = value(True, meaning="an accepted end of text makes all positions after it final (EoTP)")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Commit confident candidates, and replace committed tokens of the current block by more confident ones
    (LLaDA2.1)."""

    confidence: float = value(0.95, ABOVE_0, "probability that a candidate must exceed")
    edit_confidence: float = value(0.9, ABOVE_0, "probability that a replacement must exceed")
    passes: int = value(16, within(0, 64), "largest number of passes over a block after it is full")


@dataclass(frozen=True, kw_only=True)
class Ngram:
    """Prompt-lookup speculative decoding of autoregressive models. With greedy decoding the answer is the same, in
    fewer passes, except for ties in the last bits of logits."""

    length: int = value(8, within(1, 64), "tokens of a draft")
    longest: int = value(4, within(1, 16), "largest n-gram that is looked up, in tokens")
    shortest: int = value(2, within(1, 16), "smallest n-gram that is looked up, in tokens")


@dataclass(frozen=True)
class Guided:
    """The model's companion verifies the drafted block from left to right (arXiv 2505.21467)."""

    top_k: int = value(0, at_least(0), "keep drafted tokens among the companion's top_k; 0 = only its own choice")
    ratio: float = value(0.5, SHARE, "with top_k: lowest probability of a kept token relative to the most probable one")


@dataclass(frozen=True)
class DraftModel:
    """Speculative decoding of autoregressive models: the model's companion drafts (arXiv 2211.17192). With greedy
    decoding the answer is the same, in fewer passes, except for ties in the last bits of logits."""

    length: int = value(4, within(1, 64), "tokens of a draft")


@dataclass(frozen=True)
class Scheduler:
    """A discrete scheduler that the server's configuration defines under ``[schedulers.NAME]``."""

    name: str = value(meaning="NAME of the scheduler")


@dataclass(frozen=True, kw_only=True)
class EarlyCommit:
    """Commits all remaining positions at once when the model is certain of the answer (Prophet, arXiv 2508.19982).

    Certain: the gap of the two highest logits is at least ``early`` (later ``middle``, ``late``) on average over the
    answer's positions, including final ones that a pass runs. ``base`` is the policy until then, by name or as a class;
    default ``low_confidence``.
    """

    early: float = value(7.5, NUMBER, "required gap of the top two logits in the first 33% of the steps")
    middle: float = value(5.0, NUMBER, "required gap from 33% of the steps on")
    late: float = value(2.5, NUMBER, "required gap from 67% of the steps on")
    mistakes: float = value(0.0, at_least(0), "above 0: commit when at most this many tokens are expected to be wrong")
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
