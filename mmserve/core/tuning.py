"""Selection of a model's default policies: measured pairs of policies, and a request's quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmserve.core.request import Policy

EXACT, BALANCED, FAST = "exact", "balanced", "fast"
QUALITIES = (EXACT, BALANCED, FAST)
#: Names of qualities: plain decoding, the model's default, the fastest within three points.
Quality = Literal["exact", "balanced", "fast"] | float
#: Minimum quality (1 = as good as plain decoding) of the pairs that each named quality may choose from.
FLOORS = {BALANCED: 0.99, FAST: 0.97}
#: Relative difference up to which times of two pairs are considered equal.
NOISE = 0.1

#: Commit policies that draft: some positions may run again with other tokens.
DRAFTING = frozenset({"ngram", "draft_model"})
#: Commit policies that need a companion model.
ACCOMPANIED = frozenset({"guided", "draft_model"})
#: Commit policies that re-evaluate tokens on the canvas: penalties would apply to these tokens because of their own
#: presence.
UNPENALISED = frozenset({"edit", "ngram", "guided", "draft_model", "scheduler"})


@dataclass(frozen=True)
class Pair:
    """A recompute policy and a commit policy."""

    recompute: Policy
    commit: Policy

    @classmethod
    def named(cls, recompute: str, commit: str) -> Pair:
        """The pair with these registered names and default parameters."""
        return cls(Policy(name=recompute), Policy(name=commit))

    def __str__(self) -> str:
        return f"{_written(self.recompute)} × {_written(self.commit)}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of a pair relative to plain decoding, on the same prompts.

    ``quality``: its score divided by that of plain decoding, the lower one of prompts with and without a schema. A
    prompt with a known answer scores 1 if right; any other scores the share of its tokens that equal those of plain
    decoding.
    """

    pair: Pair
    quality: float
    accuracy: float | None  # on prompts with known answers; None if there are none
    agreement: float  # mean share of tokens equal to those of plain decoding
    same: float  # share of answers equal to those of plain decoding
    time_ratio: float  # its time divided by that of plain decoding
    forwards: float  # mean number of passes of an answer


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The default policies of a model.

    ``source`` of ``default``: ``policy.json`` (then ``curve`` has the measurements, and ``measured`` how they were
    made), ``literature``, or ``plain`` if the model supports nothing faster.
    """

    source: str
    plain: Pair
    default: Pair
    curve: tuple[Measured, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)

    def pair(self, quality: str | float = BALANCED) -> Pair:
        """The pair for one of ``QUALITIES``, or for a minimum quality in (0, 1].

        Without measurements, ``fast`` is the default, and a number gives plain decoding: no other pair is known to
        reach it.
        """
        if quality == EXACT:
            return self.plain
        if quality == BALANCED:
            return self.default
        if quality == FAST:
            found = fastest(self.curve, FLOORS[FAST])
            return self.default if found is None else found.pair
        found = fastest(self.curve, float(quality))
        return self.plain if found is None else found.pair

    def figures(self, pair: Pair) -> Measured | None:
        """The measurement of ``pair``; None if it was not measured."""
        return next((row for row in self.curve if row.pair == pair), None)


def fastest(curve: Sequence[Measured], floor: float) -> Measured | None:
    """The fastest pair whose quality is at least ``floor``; None if there is none.

    Times that differ by less than ``NOISE`` count as equal: of these pairs, the one closest to plain decoding is taken,
    and of equally close ones the first of ``curve``, which begins with plain decoding.
    """
    good = [row for row in curve if row.quality >= floor]
    least = min((row.time_ratio for row in good), default=0.0)
    close = [row for row in good if row.time_ratio <= least * (1 + NOISE)]
    return max(close, key=lambda row: (row.quality, row.agreement), default=None)


def _written(policy: Policy) -> str:
    """The policy in call notation, such as ``threshold(confidence=0.9)``."""
    parts = [f"{name}={value}" for name, value in policy.options.items()]
    parts += [f"base={_written(policy.base)}"] if policy.base is not None else []
    return f"{policy.name}({', '.join(parts)})" if parts else policy.name
