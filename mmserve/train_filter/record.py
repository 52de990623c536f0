"""Recorded trajectories of a model's decoder: inputs of a filter at each step, with labels.

As in ims-kdks/Learning-to-Parallel-Decoding, generate_training_data.py: the final answer of the baseline is the ground
truth, and a second run commits at every step all candidates that agree with it, as a perfect filter would. There only
those states are recorded; here also some of the baseline's own, which are the states of a filter with few accepted
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mmserve.config import EngineConfig, MediaConfig
from mmserve.core.canvas import MASKED
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import BlockWise
from mmserve.decode.commit.learned import block_confidence
from mmserve.decode.state import Decoding
from mmserve.kv.pool import pages_for
from mmserve.kv.table import PageTable
from mmserve.models.base import LoadedModel
from mmserve.stages import Stages

#: One of this many baseline steps is recorded: consecutive ones differ by a token.
EVERY = 4
#: The ground truth for positions after the end of the baseline's answer.
NOTHING = -1


@dataclass(frozen=True)
class StepExample:
    """One step's input of a filter, over a block of ``L`` positions, and its labels."""

    confidence: np.ndarray  # float32 [L], of the candidates; 1 if final
    still_open: np.ndarray  # bool [L]
    right: np.ndarray  # bool [L], the candidate equals the baseline's final token
    judged: np.ndarray  # bool [L], open, with a candidate, and the baseline has a token here


@dataclass(frozen=True)
class Decoded:
    """One answer and its cost."""

    answer: str
    tokens: int  # number of tokens of the answer
    forwards: int


@dataclass(frozen=True)
class Trajectory:
    """One request: the baseline's answer, and the recorded steps."""

    baseline: Decoded
    examples: tuple[StepExample, ...]


@dataclass(frozen=True)
class Agreeing(BlockWise):
    """Commits all candidates that equal ``final`` (int64 ``[N]``): a perfect filter, without a schedule."""

    final: np.ndarray

    def choose(self, canvas: object, candidates: Candidates) -> np.ndarray:
        agree: np.ndarray = candidates.tokens == self.final[candidates.positions]
        return agree


class Recorder:
    """Runs requests one after another through the stages of a served model, and records every step."""

    def __init__(self, model: LoadedModel, engine: EngineConfig) -> None:
        pages = pages_for(engine.max_tokens, engine.page_size)
        self._stages = Stages(model, engine, MediaConfig())
        self._pages = PageTable(tuple(range(pages)))

    def trajectory(self, request: Request) -> Trajectory:
        """The baseline's answer to ``request``, and the steps of both runs."""
        seen: list[tuple[Candidates, int, np.ndarray, np.ndarray]] = []
        for step, state in enumerate(self._steps(request)):
            if step % EVERY == 0:
                seen.append(_seen(state))
        final = np.where(state.canvas.committed_at == MASKED, NOTHING, state.canvas.tokens)
        baseline = _decoded(state)
        examples = [_example(*step, final) for step in seen]
        for state in self._steps(request, lambda _own: Agreeing(final)):
            examples.append(_example(*_seen(state), final))
            if not examples[-1].right.any():
                break  # every candidate is wrong: a perfect filter would accept none
        return Trajectory(baseline, tuple(examples))

    def decode(self, request: Request, commit: Commit) -> Decoded:
        """The answer to ``request`` with the commit policy ``commit``."""
        *_before, state = self._steps(request, lambda _own: commit)
        return _decoded(state)

    def _steps(self, request: Request, commit: Callable[[Commit], Commit] = lambda own: own) -> Iterator[Decoding]:
        """The request's decode state at each step, with candidates computed and none of them committed yet."""
        decoder = self._stages.decoder
        [encoded] = self._stages.encoder.encode([request])
        begun = decoder.begin(request, encoded, self._pages)
        prefilled = None
        while prefilled is None:
            [prefilled] = decoder.prefill([(request, begun)])
        state = decoder.open(request, prefilled)
        state.commit = commit(state.commit)
        reason = None
        while reason is None:
            decoder.propose([state])
            yield state
            reason = decoder.commit(state).reason


def _seen(state: Decoding) -> tuple[Candidates, int, np.ndarray, np.ndarray]:
    """A step's candidates, the start of its block, and the filter's inputs for the block."""
    if state.candidates is None:
        raise ValueError("read before anything was proposed")
    return state.candidates, state.canvas.block_start, *block_confidence(state.canvas, state.candidates)


def _example(
    candidates: Candidates, start: int, confidence: np.ndarray, still_open: np.ndarray, final: np.ndarray
) -> StepExample:
    at, truth = candidates.positions - start, final[candidates.positions]
    right, judged = np.zeros_like(still_open), np.zeros_like(still_open)
    right[at], judged[at] = candidates.tokens == truth, truth != NOTHING
    return StepExample(confidence, still_open, right, judged)


def _decoded(state: Decoding) -> Decoded:
    return Decoded(state.text.text, state.text.tokens, state.forwards)
