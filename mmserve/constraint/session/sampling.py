"""Next tokens drawn from the model's distribution over answers that can still end within the budget.

Adaptive weighted rejection sampling (AWRS, arXiv 2504.05410): tokens are drawn without replacement, in the order of
their Gumbel noise, until one is accepted, which is a sample from the accepted tokens alone. A few further draws give an
unbiased estimate of the total probability of all accepted tokens, independent of the token drawn; the product of these
estimates is the importance weight of a text.

Adaptive sampling with approximate expected futures (ASAp, arXiv 2405.21047): a token is drawn by its probability times
its expected future, the probability that the model continues to a valid answer. It is initially 1; observations of
earlier samples lower it, but never below the true value, so that samples approach the model's distribution over valid
answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmserve.constraint.search import parser_states
from mmserve.constraint.search.feasibility import Completions
from mmserve.constraint.search.matcher import Matcher, after
from mmserve.constraint.search.vocabulary import Lexicon
from mmserve.constraint.search.witness import Witness
from mmserve.constraint.session.observer import Meter

#: Maximum draws until one is accepted; the last one represents all that are left, so that the work is bounded.
MOST = 32
#: Number of draws after the accepted one, for the estimate.
FURTHER = 4

A = TypeVar("A")


@dataclass(frozen=True)
class Draw(Generic[A]):
    """The result of the draws: the accepted entry, if there is one, and the rejected ones."""

    chosen: int | None  # its index; None = the weight is zero
    accepted: A | None  # the result of ``accepts`` for it
    mass: float  # estimate of the accepted entries' mass
    rejected: tuple[int, ...]  # indices, in the order of the draws
    before: int  # of these, drawn before the accepted one


def draw(mass: np.ndarray, noised: np.ndarray, accepts: Callable[[int], A | None]) -> Draw[A]:
    """An entry for which ``accepts`` does not return None, with probability proportional to its mass.

    With the drawn entry ``i`` and the estimate ``W``, ``E[W f(i)]`` is the sum of ``mass[i] f(i)`` over all accepted
    entries, for any ``f``. ``accepts`` must not depend on earlier calls; it is called at most ``MOST + FURTHER`` times.

    Args:
        mass: float64 ``[n]``, at least 0.
        noised: float ``[n]``, logarithms of ``mass`` plus independent standard Gumbel noise; -inf where it is 0.
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
        if nth + 1 == MOST:  # a draw from the rest, accepted or not, has the weight of the whole rest
            return Draw(entry, accepted, float(here), tuple(rejected), before)
        further = order[nth + 1 : nth + 1 + FURTHER]
        passed = [accepts(other) is not None for other in further]
        rejected += [other for other, good in zip(further, passed, strict=True) if not good]
        total = float(mass[entry]) + _accepted(left, further, passed)
        return Draw(entry, accepted, total, tuple(rejected), before)
    return Draw(None, None, 0.0, tuple(rejected), len(rejected))


def _accepted(left: np.ndarray, drawn: list[int], passed: list[bool]) -> float:
    """An unbiased estimate of the accepted part of ``left [n]``, from entries drawn from it without replacement.

    Des Raj's estimator (J. Am. Stat. Assoc. 51, 1956): each draw gives an estimate, which is what was accepted before
    it and, if it is accepted itself, all that was left at that time; the result is their mean. Exact if everything was
    drawn.
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
    """Indices of the ``count`` largest of ``noised [n]``, in descending order; without those of -inf."""
    first = np.arange(len(noised))
    if len(noised) > count:
        first = np.argpartition(-noised, count - 1)[:count]
    ordered: list[int] = first[np.argsort(-noised[first], kind="stable")].tolist()
    return [i for i in ordered if noised[i] > -math.inf]


@dataclass
class PrefixNode:
    """A node of the tree of answer prefixes."""

    future: float = 1.0  # upper bound of the probability that the model continues to a valid answer
    allowed: float = 1.0  # total probability of the tokens that the grammar allows here
    #: Token → its probability, and the node after it.
    next: dict[int, tuple[float, PrefixNode]] = field(default_factory=dict)

    def futures(self, tokens: np.ndarray) -> np.ndarray:
        """Float64 ``[n]``: the expected futures after ``tokens`` (int64 ``[n]``)."""
        found = np.ones(len(tokens))
        for token, (_probability, node) in self.next.items():
            found[tokens == token] = node.future
        return found


@dataclass(frozen=True)
class Visit:
    """One prefix on a sample's path: the sample's token, and tokens that lead to no valid answer."""

    token: int | None  # None = there was none
    probability: float
    allowed: float  # total probability of the tokens that the grammar allows there
    rejected: tuple[tuple[int, float], ...]  # tokens and their probabilities


def learn(root: PrefixNode, path: Sequence[Visit]) -> None:
    """Update the tree with a sample's path, from the first token of its answer to the last."""
    nodes = [root]
    for visit in path:
        node = nodes[-1]
        node.allowed = visit.allowed
        for token, probability in visit.rejected:
            node.next[token] = (probability, PrefixNode(future=0.0))
        if visit.token is not None:
            nodes.append(node.next.setdefault(visit.token, (visit.probability, PrefixNode()))[1])
    for node in reversed(nodes[: len(path)]):
        # known parts are summed separately: differences from 1 below 1e-16 would be lost
        known = math.fsum(probability * other.future for probability, other in node.next.values())
        rest = node.allowed - math.fsum(probability for probability, _other in node.next.values())
        node.future = min(node.future, max(0.0, rest) + known)


def child(node: PrefixNode | None, token: int) -> PrefixNode | None:
    """The node after ``token``; None if nothing is known there."""
    found = None if node is None else node.next.get(token)
    return None if found is None else found[1]


@dataclass
class SampleState:
    """The state of one sample's draws.

    ``exp(log_weight)`` is its importance weight. With the model's probability ``p`` of an answer under the request's
    sampling parameters, the mean over samples of ``exp(log_weight) f(answer)`` has the expectation ``Σ p(answer)
    f(answer)`` over the valid answers: weighted by normalised weights, samples follow the model's distribution over
    valid answers. An answer is valid if a completion within the budget was found after each of its tokens: that search
    is bounded, and depends only on the preceding tokens.
    """

    futures: PrefixNode | None = None  # tree of observations of the request's earlier samples; None for AWRS
    speculates: bool = True  # whether forced text is run as a draft: the model may be asked after tokens not final
    log_weight: float = 0.0
    here: PrefixNode | None = None  # the node after the final tokens
    visits: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.here = self.futures

    def take(self, run: SampledRun, ends: frozenset[int]) -> None:
        """Record a run that has become final; ``ends``: the tokens that end an answer."""
        alive = self.log_weight > -math.inf
        self.log_weight += run.log_weight
        self.visits += run.visits if self.futures is not None else ()
        for token in run.tokens.tolist():
            self.here = child(self.here, token)
        over = run.tokens[-1] in ends or run.witness.known == len(run.witness.tokens)
        if self.futures is not None and alive and (over or self.log_weight == -math.inf):
            learn(self.futures, self.visits)


@dataclass(frozen=True)
class SampledRun:
    """Tokens drawn in one pass, consecutive from the first open position on."""

    tokens: np.ndarray  # int64 [n], n at least 1
    log_probabilities: np.ndarray  # float32 [n], before temperature, filters and constraint
    witness: Witness  # after these tokens
    log_weight: float  # log-weight of these draws; -inf if every allowed token has probability 0
    visits: tuple[Visit, ...] = ()  # observations for other samples (ASAp) in the same process


@dataclass(frozen=True)
class _Ending:
    """A completion after a token, and the matcher before that token."""

    matcher: Matcher
    tokens: tuple[int, ...]


class RejectionSampler:
    """Draws next tokens while the sampler reads logits: from the first open position on, as long as the draft agrees
    with the tokens drawn.

    ``positions`` are relative to the answer's start; ``drafted``: the tokens that the pass ran from the first open
    position on. ``guard`` calls the parser, and returns None if it fails. Arguments are not modified.
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
        self._zero_weight = sampled.log_weight == -math.inf
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []
        self._visits: list[Visit] = []
        self._open = True

    def restrict(self, logits: Tensor) -> None:
        """Does nothing: draws are from the model's unrestricted distribution."""

    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Draw from the next rows: ``logits [n, V]``, their logsumexp ``log_z [n]``, the filtered and tempered logits,
        and these plus Gumbel noise. ``masks`` is not used: the mask token is never drawn."""
        with self.meter.running():
            if tempered is None or noised is None:
                raise ValueError("draws need a temperature")
            for row in range(len(logits)):
                if self._open:
                    token = self._drawn(tempered[row], noised[row])
                    self._tokens.append(token)
                    plain = logits[row, token] - log_z[row]
                    self._log_probabilities.append(float(plain))
                    n = len(self._tokens)
                    drafted = n <= len(self._drafted) and token == self._drafted[n - 1]
                    self._open &= drafted and token not in self._witness.ends

    def ranked(self) -> SampledRun:
        """The tokens drawn so far."""
        tokens = np.array(self._tokens, np.int64)
        log_probabilities = np.array(self._log_probabilities, np.float32)
        return SampledRun(tokens, log_probabilities, self._witness, self._log_weight, tuple(self._visits))

    def _drawn(self, tempered: Tensor, noised: Tensor) -> int:
        """The next token; if none can be drawn, the witness's, with weight zero."""
        witness = self._witness
        found: Draw[_Ending] | None = None
        if not self._zero_weight:
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
        """A draw from log-probabilities ``[V]`` and the same with noise; the drawn index is a token."""
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
            self._visits.append(Visit(None, 0.0, allowed, rejected))
            return found
        self._log_weight += math.log(found.mass) - math.log(futures[chosen])
        self._visits.append(Visit(int(tokens[chosen]), float(probabilities[chosen]), allowed, rejected))
        return replace(found, chosen=int(tokens[chosen]))


def _ending(witness: Witness, answer: Sequence[int], token: int, lexicon: Lexicon) -> _Ending | None:
    """A completion within the budget after ``token`` at the first open position; None if none was found.

    Depends only on the tokens before that position. ``answer``: the witness up to its end.
    """
    if token in witness.ends:
        return _Ending(witness.matcher, ()) if witness.matcher.accepting else None
    fork, size = after(witness.matcher, [token]), len(witness.tokens)
    room = size - witness.known - 1
    if fork is None or (not room and not fork.accepting):
        return None
    completions = Completions(answer, size, lexicon, states=min(60, 4 * room), searches=1, patient=True)
    way = completions.tail(parser_states.ParserState(fork, None, 0), witness.known + 1)
    return None if way is None else _Ending(fork, way)


def _extended(witness: Witness, token: int, way: _Ending, *, cut: bool) -> Witness:
    """The witness after ``token`` at its first open position, completed by ``way``."""
    tokens, content = witness.tokens.copy(), token not in witness.ends
    length = witness.known + content + len(way.tokens)
    tokens[witness.known] = token
    tokens[witness.known + 1 : length] = way.tokens
    tokens[max(length, witness.known + 1) :] = min(witness.ends)
    return replace(
        witness, tokens=tokens, length=length, matcher=way.matcher, known=witness.known + 1, cut=witness.cut or cut
    )
