"""Next tokens drawn true to the model: those after which an answer can still be brought to its end in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.constraint.search import parser_states
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.closing import Closing
from mmserve.constraint.search.completion import after
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.witness import Witness
from mmserve.constraint.session.futures import PrefixNode, Visit, child, learn
from mmserve.constraint.session.meter import Meter, metered
from mmserve.constraint.session.rejection import Draw, draw


@dataclass
class SampleState:
    """What one sample of a request keeps of its draws.

    ``exp(log_weight)`` is its importance weight. With the model's probability ``p`` of an answer, as the request draws
    (temperature, filters, penalty), the mean over samples of ``exp(log_weight) f(answer)`` has the expectation
    ``Σ p(answer) f(answer)`` over the valid answers: normalised to a sum of 1, the weights make of samples draws from
    the model's distribution over valid answers. Valid are answers of which, token by token, an end within the budget
    was found: the search for one is bounded, and asks nothing but what stands left of a token.
    """

    futures: PrefixNode | None = None  # what earlier samples of the request met; None = not asked for (AWRS)
    speculates: bool = True  # whether forced text is run as a draft: the model may be asked after tokens not final
    log_weight: float = 0.0
    here: PrefixNode | None = None  # what is known at the end of what stands
    met: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.here = self.futures

    def take(self, run: SampledRun, ends: frozenset[int]) -> None:
        """Note a run that has become final; ``ends``: the tokens that end an answer."""
        alive = self.log_weight > -math.inf
        self.log_weight += run.log_weight
        self.met += run.met
        for token in run.tokens.tolist():
            self.here = child(self.here, token)
        over = run.tokens[-1] in ends or run.witness.known == len(run.witness.tokens)
        if self.futures is not None and alive and (over or self.log_weight == -math.inf):
            learn(self.futures, self.met)


@dataclass(frozen=True)
class SampledRun:
    """Tokens drawn in one pass, one after another from the first open position on."""

    tokens: np.ndarray  # int64 [n], n at least 1
    log_probabilities: np.ndarray  # float32 [n], before temperature, filters and constraint
    witness: Witness  # with these tokens
    log_weight: float  # of these draws; -inf where none of the tokens that may stand there can be said
    met: tuple[Visit, ...]


@dataclass(frozen=True)
class _Ending:
    """A way to the end after a token, and the matcher there."""

    matcher: Matcher
    tokens: tuple[int, ...]


class RejectionSampler:
    """Draws while logits become candidates (``decode/sampler.py``): from the first open position on, for as long as the
    model had seen what was drawn.

    ``positions`` count from the answer's start; ``drafted`` are the tokens that the pass ran from the first open one
    on. ``guard`` asks the parser, and says None where it fails. Nothing that is given is changed.
    """

    def __init__(
        self,
        positions: np.ndarray,
        witness: Witness,
        lexicon: Lexicon,
        drafted: np.ndarray,
        sampled: SampleState,
        guard: Callable[[Callable[[], Draw[_Ending] | None]], Draw[_Ending] | None],
        meter: Meter,
    ) -> None:
        if not len(positions) or positions[0] != witness.known:
            raise ValueError("draws begin at the first open position")
        self._witness, self._lexicon, self._drafted, self._guard = witness, lexicon, drafted.tolist(), guard
        self.meter = meter
        self._here, self._log_weight = sampled.here, 0.0
        self._begun_dead = sampled.log_weight == -math.inf
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []
        self._met: list[Visit] = []
        self._open = True

    def restrict(self, logits: Tensor) -> None:
        """Nothing: the model's own distribution is drawn from."""

    @metered
    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Draw from the next rows: ``logits [n, V]``, log of the sum of their exponentials ``[n]``, the same filtered
        and tempered, and these with Gumbel noise. ``masks`` has no part: what is drawn is never the mask."""
        if tempered is None or noised is None:
            raise ValueError("draws need a temperature")
        for row in range(len(logits)):
            if self._open:
                token = self._drawn(tempered[row], noised[row])
                self._tokens.append(token)
                plain = logits[row, token] - log_z[row]
                self._log_probabilities.append(float(plain))
                n = len(self._tokens)
                led = n <= len(self._drafted) and token == self._drafted[n - 1]
                self._open &= led and token not in self._witness.ends

    def ranked(self) -> SampledRun:
        """What was drawn."""
        tokens = np.array(self._tokens, np.int64)
        log_probabilities = np.array(self._log_probabilities, np.float32)
        return SampledRun(tokens, log_probabilities, self._witness, self._log_weight, tuple(self._met))

    def _drawn(self, tempered: Tensor, noised: Tensor) -> int:
        """The next token; the witness's, at a weight of zero, where none can be drawn."""
        witness = self._witness
        found: Draw[_Ending] | None = None
        if not self._begun_dead:
            log_p = (tempered - torch.logsumexp(tempered, -1)).cpu().numpy()
            found = self._guard(lambda: self._asked(log_p, noised.cpu().numpy()))
        if found is None or found.accepted is None or found.chosen is None:
            self._log_weight, self._open = -math.inf, False
            return int(witness.tokens[witness.known])
        token, way = found.chosen, found.accepted
        self._here = child(self._here, token)
        self._witness = _extended(witness, token, way, cut=found.before > 0)
        return token

    def _asked(self, log_p: np.ndarray, noised: np.ndarray) -> Draw[_Ending]:
        """A draw from log-probabilities ``[V]``, given them with noise; its index is a token."""
        witness, node = self._witness, self._here
        ends = sorted(witness.ends) if witness.matcher.accepting else []
        tokens = np.concatenate([witness.matcher.allowed(), np.array(ends, np.int64)])
        probabilities = np.exp(log_p[tokens].astype(np.float64))
        futures = np.ones(len(tokens)) if node is None else node.futures(tokens)
        mass = probabilities * futures
        scores = np.where(mass > 0, noised[tokens] + np.log(np.where(mass > 0, futures, 1.0)), -np.inf)
        answer = witness.tokens[: witness.length].tolist()
        found = draw(mass, scores, lambda i: _ending(witness, answer, int(tokens[i]), self._lexicon))
        rejected = tuple((int(tokens[i]), float(probabilities[i])) for i in found.rejected)
        allowed, chosen = float(probabilities.sum()), found.chosen
        if chosen is None:
            self._met.append(Visit(None, 0.0, allowed, rejected))
            return found
        self._log_weight += math.log(found.mass) - math.log(futures[chosen])
        self._met.append(Visit(int(tokens[chosen]), float(probabilities[chosen]), allowed, rejected))
        return replace(found, chosen=int(tokens[chosen]))


def _ending(witness: Witness, answer: Sequence[int], token: int, lexicon: Lexicon) -> _Ending | None:
    """How an answer ends in time that has ``token`` at its first open position; None where no way was found.

    It depends on what stands left of the token, and nothing else. ``answer``: the witness up to its end.
    """
    if token in witness.ends:
        return _Ending(witness.matcher, ()) if witness.matcher.accepting else None
    fork, size = after(witness.matcher, [token]), len(witness.tokens)
    room = size - witness.known - 1
    if fork is None or (not room and not fork.accepting):
        return None
    closing = Closing(answer, size, lexicon, states=min(60, 4 * room), searches=1, patient=True)
    way = closing.tail(parser_states.ParserState(fork, None, 0), witness.known + 1)
    return None if way is None else _Ending(fork, way)


def _extended(witness: Witness, token: int, way: _Ending, *, cut: bool) -> Witness:
    """The witness after ``token`` at its first open position, with ``way`` to the end."""
    tokens, content = witness.tokens.copy(), token not in witness.ends
    length = witness.known + content + len(way.tokens)
    tokens[witness.known] = token
    tokens[witness.known + 1 : length] = way.tokens
    tokens[max(length, witness.known + 1) :] = min(witness.ends)
    return replace(
        witness, tokens=tokens, length=length, matcher=way.matcher, known=witness.known + 1, cut=witness.cut or cut
    )
