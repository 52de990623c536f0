"""How a traced request gets on: what an engine reports beside the events that are for the client.

Times are nanoseconds since 1970, so that those of several machines go together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmserve.core.request import Stage

#: The first candidates for the answer, its first final position (wherever it is), and its first final text.
Milestone = Literal["draft", "commit", "text"]


@dataclass(frozen=True)
class Step:
    """What one decode step of a sample did.

    ``block`` counts from 0; a block of a next-token model is ``TOKENS_TOGETHER`` tokens here.
    """

    block: int
    committed: int  # positions that it made final
    edited: int  # committed tokens that it replaced
    forwards: int  # passes so far, with that of prefill
    constraint_seconds: float  # processor time of the constraint so far


#: Blocks of next-token models are one token long, too short to be reported one by one.
TOKENS_TOGETHER = 32


@dataclass(frozen=True)
class StageEntered:
    """A request, or a sample of it once it is encoded, went on to ``stage``."""

    stage: Stage
    at: int
    sample: int = 0


@dataclass(frozen=True)
class StepTaken:
    """A sample made a decode step, which ended then."""

    step: Step
    at: int
    sample: int = 0


@dataclass(frozen=True)
class Reached:
    """A sample came to a milestone."""

    milestone: Milestone
    at: int
    sample: int = 0


Progress = StageEntered | StepTaken | Reached
