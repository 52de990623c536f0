"""A simulated model that predicts a given document with noise, for tests and benchmarks of constraints.

Its confidence is higher near committed tokens. Sometimes it is off by one (predicts the next token of the document, as
models do while the length of a text is undetermined), and it ignores the schema.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.vocabulary import Lexicon
from mmserve.constraint.search.witness import Witness
from mmserve.constraint.session.session import Session, known_tokens
from mmserve.core.candidates import Candidates
from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit.threshold import Threshold
from mmserve.decode.sampler import candidates


@dataclass(frozen=True)
class Copyist:
    """Draws candidates for masked positions."""

    document: Sequence[int]
    end: int
    rng: random.Random
    accuracy: float = 0.7  # of the top-1 token, far from committed tokens
    slip: float = 0.15  # probability that a run of positions is off by one
    k: int = 8

    def candidates(self, known: np.ndarray, positions: np.ndarray) -> TopK:
        rng, size = self.rng, len(known)
        target = [*self.document, *[self.end] * (size + 2)]
        words = [*set(self.document), self.end]
        tokens, scores, moved = [], [], 0
        for p in positions.tolist():
            near = (known[max(0, p - 4) : p + 5] >= 0).mean()
            if rng.random() < 0.2:
                moved = rng.choice((-1, 1)) if rng.random() < self.slip * (1 - near) else 0
            right = target[max(0, p + moved)]
            good = rng.random() < min(0.985, self.accuracy + (1 - self.accuracy) * near)
            row = [right] if good else [rng.choice(words), right] if rng.random() < 0.7 else [rng.choice(words)]
            sure = rng.uniform(0.6, 0.99) if good else rng.uniform(0.3, 0.9)
            while len(row := list(dict.fromkeys(row))) < self.k:
                row.append(rng.choice(words) if len(words) > self.k else rng.randrange(1000))
            rest = np.sort(np.array([rng.random() for _ in range(self.k - 1)]))[::-1]
            tokens.append(row)
            scores.append(np.log([sure, *((1 - sure) * 0.9 * rest / rest.sum())]))
        return TopK(positions, np.array(tokens, np.int64), np.array(scores, np.float32))


def observed(session: Session, canvas: Canvas, top: TopK) -> Candidates:
    """The candidates of a pass whose logits are those of ``top`` at masked positions, and -inf for other tokens;
    ``session`` observes them."""
    logits = torch.full((len(top.positions), len(session.answer.lexicon.spelled)), -torch.inf)
    logits.scatter_(1, torch.from_numpy(top.tokens), torch.from_numpy(top.log_probabilities))
    targets = canvas.prompt_length + top.positions
    observer = session.observe(canvas, targets)
    found = candidates(logits, targets, canvas, Sampling(), (), observer, reads=frozenset())
    canvas.count_forward()
    return found


def blank(session: Session, block: int) -> Canvas:
    """A canvas for the session's whole answer, all positions masked, after a prompt of one token."""
    size, vocabulary = len(session.answer.witness.tokens), len(session.answer.lexicon.spelled)
    return Canvas.create(np.zeros(1), new_tokens=size, block_length=block, mask_id=vocabulary)


@dataclass
class Decoded:
    """The result of a simulated decode."""

    tokens: list[int]  # of the answer, without its end
    commits: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def text(self, lexicon: Lexicon) -> str:
        return lexicon.text(self.tokens).decode()


def decode(
    session: Session,
    model: Copyist,
    *,
    block: int = 32,
    threshold: float = 0.9,
    clock: Callable[[], float] | None = None,
    check: Callable[[Witness, np.ndarray], None] = lambda witness, known: None,
) -> Decoded:
    """Fill a canvas block by block with ``Session.choose`` and the commit policy ``threshold``.

    ``clock`` times the work of each step except reading logits; ``check`` is called with every witness.
    """
    canvas, commit, result = blank(session, block), Threshold(threshold), Decoded([])
    while not canvas.answer(session.answer.witness.ends)[1]:
        top = model.candidates(known_tokens(canvas), canvas.block_masked() - canvas.prompt_length)
        proposed = observed(session, canvas, top)
        started = clock() if clock else 0.0
        final = session.choose(canvas, proposed, commit)
        canvas.commit(final.positions, final.tokens)
        session.sync(canvas)
        if clock:
            result.seconds.append(clock() - started)
        result.commits.append(len(final.positions))
        check(session.answer.witness, known_tokens(canvas))
    result.tokens = canvas.answer(session.answer.witness.ends)[0].tolist()
    return result


def written(document: Any) -> str:
    """``document`` as compact JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)
