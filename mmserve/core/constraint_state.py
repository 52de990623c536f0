"""A constrained request between stages, as plain data: grammars as texts, and how far its answer has come.

The parsers are made again where the request goes on, and led to where they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class LanguageState:
    """One compiled grammar as its text; or a template as one language: its ``texts``, and the grammar of each hole
    between them with the number of tokens (``most``) that may fill it."""

    grammars: tuple[str, ...]
    texts: tuple[bytes, ...] = ()
    most: tuple[int, ...] = ()


@dataclass(frozen=True)
class WitnessState:
    """A witness: as ``Witness``, without its parser."""

    language: LanguageState
    tokens: np.ndarray  # int64 [N]
    length: int
    known: int
    closes: tuple[tuple[int, ...], ...] = ()
    cut: bool = False


@dataclass(frozen=True)
class RankedState:
    """The top-K tokens of each position of a pass, as ``Ranked``."""

    positions: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n, K]
    log_probabilities: np.ndarray  # float32 [n, K]
    plain: np.ndarray  # float32 [n, K]
    own: np.ndarray  # float32 [n]
    kept: np.ndarray  # float32 [n]


@dataclass(frozen=True)
class RunState:
    """Tokens drawn in a pass and not yet final: as ``Run``."""

    tokens: np.ndarray  # int64 [n]
    log_probabilities: np.ndarray  # float32 [n]
    witness: WitnessState
    log_weight: float


@dataclass(frozen=True)
class SampledState:
    """The draws of a sample so far: as ``Sampled``."""

    speculates: bool
    log_weight: float


@dataclass(frozen=True)
class MeterState:
    """What the constraint took so far: as ``Meter``."""

    fallbacks: int
    late: int
    forward_seconds: float
    steps: np.ndarray  # float64, seconds of each step that is done
    open: float  # seconds of the step in progress
    outcomes: tuple[str, ...]  # of its searches


@dataclass(frozen=True)
class ConstraintState:
    """One request's constraint: as ``Constrained``; with ``gaps``, of a template whose holes are filled side by side.

    The validator of the finished answer follows from the request; ``judged`` and ``judged_holes``: whether it has one.
    """

    witness: WitnessState
    warnings: tuple[str, ...]
    judged: bool
    judged_holes: tuple[bool, ...]
    sampled: SampledState | None
    ranked: RankedState | RunState | None
    drafted: np.ndarray  # int64
    forced: bool
    asked: int
    broken: bool
    late: int
    given: np.ndarray  # int64 [N]
    meter: MeterState | None
    gaps: tuple[GapState, ...] = field(default=())


@dataclass(frozen=True)
class GapState:
    """A hole: its first position in the answer, and its own state, which counts from there and has no meter."""

    start: int
    state: ConstraintState
