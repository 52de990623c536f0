"""Adaptive weighted rejection sampling of one token (AWRS, arXiv 2504.05410).

Tokens are drawn without replacement, in the order of their Gumbel noise, until one is accepted: that one is drawn from
the accepted tokens alone. A few further draws estimate how probable those are together, without bias whichever token it
was: the product of these estimates is the importance weight of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

#: Draws until one is accepted. The last of them stands for all that is left: no work is without bound.
MOST = 32
#: Draws after the accepted one, for the estimate.
FURTHER = 4

A = TypeVar("A")


@dataclass(frozen=True)
class Draw(Generic[A]):
    """What came of the draws: the accepted entry if there is one, and what is known of the others."""

    chosen: int | None  # its index; None = the weight is zero
    accepted: A | None  # what ``accepts`` said of it
    mass: float  # estimate of the accepted entries' mass
    rejected: tuple[int, ...]  # indices, in the order of the draws
    before: int  # of these, drawn before the accepted one


def draw(mass: np.ndarray, noised: np.ndarray, accepts: Callable[[int], A | None]) -> Draw[A]:
    """An entry from those that ``accepts`` does not answer with None, each as probable as its mass says.

    With the entry ``i`` drawn and the estimate ``W``, ``E[W f(i)]`` is the sum of ``mass[i] f(i)`` over all accepted
    entries, for any ``f``. ``accepts`` must not depend on what it was asked before; it is asked
    ``MOST + FURTHER`` times at most.

    Args:
        mass: float64 ``[n]``, at least 0.
        noised: float ``[n]``, logarithms of ``mass`` and independent standard Gumbel noise; -inf where it is 0.
    """
    order, left = _in_order(noised, MOST + FURTHER), mass.copy()
    rejected: list[int] = []
    for nth, entry in enumerate(order[:MOST]):
        here = left.sum()
        left[entry] = 0.0
        accepted = accepts(entry)
        if accepted is None:
            rejected.append(entry)
            continue
        before = len(rejected)
        if nth + 1 == MOST:  # a draw from what was left, whether it is accepted or not, weighs as much as that
            return Draw(entry, accepted, float(here), tuple(rejected), before)
        further = order[nth + 1 : nth + 1 + FURTHER]
        passed = [accepts(other) is not None for other in further]
        rejected += [other for other, good in zip(further, passed, strict=True) if not good]
        total = float(mass[entry]) + _accepted(left, further, passed)
        return Draw(entry, accepted, total, tuple(rejected), before)
    return Draw(None, None, 0.0, tuple(rejected), len(rejected))


def _accepted(left: np.ndarray, drawn: list[int], passed: list[bool]) -> float:
    """An estimate without bias of the accepted part of ``left [n]``, from entries drawn of it without replacement.

    Des Raj's (J. Am. Stat. Assoc. 51, 1956): each draw gives an estimate, what was accepted before it and, if it is
    accepted itself, all that was left then; this is their mean. Exact where nothing is left undrawn.
    """
    rest, found, estimates = float(left.sum()), 0.0, list[float]()
    for entry, good in zip(drawn, passed, strict=True):
        estimates.append(found + rest * good)
        found += float(left[entry]) * good
        rest = max(0.0, rest - float(left[entry]))
    if np.count_nonzero(left) <= len(drawn):
        return found
    return math.fsum(estimates) / len(estimates)


def _in_order(noised: np.ndarray, count: int) -> list[int]:
    """Indices of the ``count`` largest of ``noised [n]``, the largest first; those of -inf left out."""
    first = np.arange(len(noised))
    if len(noised) > count:
        first = np.argpartition(-noised, count - 1)[:count]
    ordered: list[int] = first[np.argsort(-noised[first], kind="stable")].tolist()
    return [i for i in ordered if noised[i] > -math.inf]
