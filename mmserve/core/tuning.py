"""Which policies decode a request that names none: pairs of them, how each was measured, and a request's quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmserve.core.request import Policy

EXACT, BALANCED, FAST = "exact", "balanced", "fast"
QUALITIES = (EXACT, BALANCED, FAST)
#: Plain decoding, the model's default, the fastest within three points; or the least that is wanted (plain = 1).
Quality = Literal["exact", "balanced", "fast"] | float
#: Least quality (1 = as good as plain decoding) of the pairs that a named quality may choose from.
FLOORS = {BALANCED: 0.99, FAST: 0.97}
#: Share by which times of two pairs may differ by chance.
NOISE = 0.1

#: Commit policies that draft: of the positions they run some may be run again with other tokens.
DRAFTING = frozenset({"ngram", "draft_model"})
#: Commit policies for which the model needs a companion.
ACCOMPANIED = frozenset({"guided", "draft_model"})
#: Commit policies that judge tokens which are on the canvas already: a penalty on those tokens would judge them
#: by their own presence.
UNPENALISED = frozenset({"edit", "ngram", "guided", "draft_model", "scheduler"})


@dataclass(frozen=True)
class Pair:
    """A recompute policy and a commit policy."""

    recompute: Policy
    commit: Policy

    @classmethod
    def named(cls, recompute: str, commit: str) -> Pair:
        """The pair of these registered names, with the policies' own default numbers."""
        return cls(Policy(name=recompute), Policy(name=commit))

    def __str__(self) -> str:
        return f"{_written(self.recompute)} × {_written(self.commit)}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A pair beside plain decoding, on the same prompts.

    ``quality``: its score over that of plain decoding, the lower of prompts with and without a schema. A prompt scores
    1 for a right answer where its truth is known, and else the share of its tokens that plain decoding gives, too.
    """

    pair: Pair
    quality: float
    accuracy: float | None  # of prompts whose truth is known; None where there are none
    agreement: float  # mean share of tokens that plain decoding gives, too
    same: float  # share of answers that are plain decoding's
    time_ratio: float  # its time over that of plain decoding
    forwards: float  # mean of an answer


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The policies of a model's requests that name none.

    ``source``: where ``default`` is from: ``policy.json`` (then ``curve`` is what was measured, and ``measured``
    how), ``literature``, or ``plain``, where the model has nothing faster.
    """

    source: str
    plain: Pair
    default: Pair
    curve: tuple[Measured, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)

    def pair(self, quality: str | float = BALANCED) -> Pair:
        """The pair for one of ``QUALITIES``, or for a least quality in (0, 1].

        Where nothing was measured, ``fast`` is the default, and a number is plain decoding: no other pair is known to
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
        """How ``pair`` was measured; None where it was not."""
        return next((row for row in self.curve if row.pair == pair), None)


def fastest(curve: Sequence[Measured], floor: float) -> Measured | None:
    """The pair of least time whose quality is at least ``floor``; None where no pair's is.

    Times no further apart than ``NOISE`` count as equal: then the pair closest to plain decoding is taken, and of those
    that are equally close the first of ``curve``, which begins with plain decoding.
    """
    good = [row for row in curve if row.quality >= floor]
    least = min((row.time_ratio for row in good), default=0.0)
    close = [row for row in good if row.time_ratio <= least * (1 + NOISE)]
    return max(close, key=lambda row: (row.quality, row.agreement), default=None)


def _written(policy: Policy) -> str:
    """``threshold(confidence=0.9)``."""
    parts = [f"{name}={value}" for name, value in policy.options.items()]
    parts += [f"base={_written(policy.base)}"] if policy.base is not None else []
    return f"{policy.name}({', '.join(parts)})" if parts else policy.name
