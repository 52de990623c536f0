"""A constrained request between stages, as plain data: grammars as texts, and the progress of its answer.

Parsers are created again on the receiver, and advanced to the same state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class LanguageState:
    """One compiled grammar as its text; or a template as one language: its ``texts``, and for each hole between them
    the grammar and the maximum number of tokens (``most``)."""

    grammars: tuple[str, ...]
    texts: tuple[bytes, ...] = ()
    most: tuple[int, ...] = ()


@dataclass(frozen=True)
class WitnessState:
    """A witness (see ``Witness``), without its parser."""

    language: LanguageState
    tokens: np.ndarray  # int64 [N]
    length: int
    known: int
    completions: tuple[tuple[int, ...], ...] = ()
    cut: bool = False


@dataclass(frozen=True)
class RankedState:
    """The top-K tokens of each position of a pass (see ``Ranked``)."""

    positions: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n, K]
    log_probabilities: np.ndarray  # float32 [n, K]
    plain: np.ndarray  # float32 [n, K]
    own: np.ndarray  # float32 [n]
    kept: np.ndarray  # float32 [n]


@dataclass(frozen=True)
class RunState:
    """Tokens drawn in a pass that are not final yet (see ``SampledRun``)."""

    tokens: np.ndarray  # int64 [n]
    log_probabilities: np.ndarray  # float32 [n]
    witness: WitnessState
    log_weight: float


@dataclass(frozen=True)
class SampledState:
    """The draws of a sample so far (see ``SampleState``)."""

    speculates: bool
    log_weight: float


@dataclass(frozen=True)
class MeterState:
    """The cost of the constraint so far (see ``Meter``)."""

    fallbacks: int
    late: int
    forward_seconds: float
    steps: np.ndarray  # float64, seconds of each completed step
    open: float  # seconds of the current step
    outcomes: tuple[str, ...]  # of its searches


@dataclass(frozen=True)
class ConstraintState:
    """One request's constraint (see ``ConstrainedAnswer``); ``gaps``: states of a template's holes that are filled in
    parallel.

    The validator of the finished answer is created from the request; ``validated`` and ``validated_holes``: whether the
    answer, and each hole of a template, has one.
    """

    witness: WitnessState
    warnings: tuple[str, ...]
    validated: bool
    validated_holes: tuple[bool, ...]
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
    """A hole: its first position in the answer, and its state, with positions relative to that one and without a
    meter."""

    start: int
    state: ConstraintState
