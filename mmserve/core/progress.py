"""Progress of a traced request, which an engine reports besides the client's events.

Times are nanoseconds since the Unix epoch, so that those of several hosts are comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmserve.core.request import Stage

#: Milestones: the first candidates for the answer, its first final position (anywhere), and its first final text.
Milestone = Literal["draft", "commit", "text"]


@dataclass(frozen=True)
class Step:
    """The effect of one decode step of a sample.

    ``block`` counts from 0; for a next-token model, a block is ``TOKENS_TOGETHER`` tokens.
    """

    block: int
    committed: int  # number of positions that it made final
    edited: int  # number of committed tokens that it replaced
    forwards: int  # passes so far, including prefill
    constraint_seconds: float  # CPU time of the constraint so far


#: Tokens of a next-token model that are reported as one block; its actual blocks are one token long.
TOKENS_TOGETHER = 32


@dataclass(frozen=True)
class StageEntered:
    """A request, or after encode one of its samples, entered ``stage``."""

    stage: Stage
    at: int
    sample: int = 0


@dataclass(frozen=True)
class StepTaken:
    """A sample completed a decode step at this time."""

    step: Step
    at: int
    sample: int = 0


@dataclass(frozen=True)
class Reached:
    """A sample reached a milestone."""

    milestone: Milestone
    at: int
    sample: int = 0


Progress = StageEntered | StepTaken | Reached
