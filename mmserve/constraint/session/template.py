"""A template on a diffusion model's canvas: its texts stand there from the start, its holes are filled side by side.

A hole has its own positions, and so its own witness, which knows nothing of the others. Where its answer is shorter,
end tokens stand after it up to the text that follows; they are no part of the answer's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.witness import Witness
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.judge import Judge
from mmserve.constraint.session.meter import Meter


@dataclass(frozen=True)
class Layout:
    """Where a template's texts and holes stand on an answer of ``N`` positions."""

    fixed: np.ndarray  # int64 [N], -1 in holes; an end and padding after the template
    holes: tuple[tuple[int, Witness], ...]  # first position and first witness of each

    def apart(self) -> Layout:
        """The same layout, its holes with parsers of their own."""
        return replace(self, holes=tuple((start, witness.apart()) for start, witness in self.holes))


def laid_out(parts: Sequence[Sequence[int] | Witness], size: int, ends: tuple[int, int]) -> Layout:
    """A template of texts (as tokens) and holes on ``size`` positions, enough for all of them.

    ``ends``: the token that ends an answer, and the one that fills the rest.
    """
    fixed, holes, at = np.full(size, ends[1], np.int64), list[tuple[int, Witness]](), 0
    for part in parts:
        if isinstance(part, Witness):
            holes.append((at, part))
            fixed[at : at + len(part.tokens)] = -1
            at += len(part.tokens)
        else:
            fixed[at : at + len(part)] = part
            at += len(part)
    fixed[at : at + 1] = ends[0]
    return Layout(fixed, tuple(holes))


@dataclass(frozen=True)
class HoleAnswer:
    """A hole of one request: its first position in the answer, and its own state, which counts from there."""

    start: int
    state: ConstrainedAnswer

    @property
    def stop(self) -> int:
        """First position after it."""
        return self.start + len(self.state.witness.tokens)


@dataclass(kw_only=True)
class TemplateAnswer(ConstrainedAnswer):
    """The holes of one request. ``witness`` is that of the whole answer: a row of tokens, put together anew from those
    of the holes, without a matcher of its own place. ``given`` are the texts, and what stands after them."""

    gaps: tuple[HoleAnswer, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        lexicon: Lexicon,
        warnings: tuple[str, ...],
        judge: Judge | None = None,
        judges: tuple[Judge | None, ...] = (),
    ) -> TemplateAnswer:
        """The state of a request that begins."""
        meter = Meter()
        gaps = tuple(
            HoleAnswer(start, ConstrainedAnswer(witness, lexicon, meter=meter)) for start, witness in layout.holes
        )
        whole = replace(layout.holes[0][1], tokens=layout.fixed, length=len(layout.fixed))
        made = cls(whole, lexicon, warnings, judge, judges=judges, meter=meter, gaps=gaps, given=layout.fixed)
        made._gather()
        return made

    @property
    def content(self) -> np.ndarray:
        """Bool ``[N]``: where the witness holds text, and no padding of a hole."""
        found = self.given >= 0
        for gap in self.gaps:
            found[gap.start : gap.stop] = gap.state.content
        return found

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First position, and first after, of each hole."""
        return tuple((gap.start, gap.stop) for gap in self.gaps)

    @property
    def padded(self) -> bool:
        """As of ``Canvas``: end tokens fill holes up."""
        return True

    @property
    def unread(self) -> int:
        """As of ``Canvas``: all that stands there is read."""
        return 0

    def shown(self, tokens: np.ndarray, mask_id: int) -> np.ndarray:
        """As ``ConstrainedAnswer.shown``: all that stands there."""
        return tokens

    def allowed(self, positions: np.ndarray, *, causal: bool) -> dict[int, np.ndarray]:
        """As ``ConstrainedAnswer.allowed``, for each hole."""
        found: dict[int, np.ndarray] = {}
        for gap in self.gaps:
            rows = _inside(gap, positions)
            inner = gap.state.allowed(positions[rows] - gap.start, causal=causal)
            found |= {int(rows[row]): ids for row, ids in inner.items()}
        return found

    def search(self, known: np.ndarray, top: TopK, end: int) -> None:
        """As ``ConstrainedAnswer.search``, for each hole of which ``top`` speaks."""
        for gap in self.gaps:
            rows = _inside(gap, top.positions)
            if len(rows):
                inner = TopK(top.positions[rows] - gap.start, top.tokens[rows], top.log_probabilities[rows])
                gap.state.search(known[gap.start : gap.stop], inner, min(end, gap.stop) - gap.start)
        self._gather()

    def follow(self, known: np.ndarray) -> None:
        """As ``ConstrainedAnswer.follow``, for each hole."""
        for gap in self.gaps:
            gap.state.follow(known[gap.start : gap.stop])
        self._gather()

    def settled(self, known: np.ndarray) -> np.ndarray:
        """The open positions of holes whose answer is final, with an end after it."""
        found = [np.zeros(0, np.int64)]
        for gap in self.gaps:
            inner, length = known[gap.start : gap.stop], gap.state.witness.length
            if (inner[:length] >= 0).all() and (inner[length:] >= 0).any():
                found.append(gap.start + np.flatnonzero(inner < 0))
        return np.concatenate(found)

    def decided(self, known: np.ndarray) -> np.ndarray:
        """As ``ConstrainedAnswer.decided``, of each hole."""
        found = [gap.start + gap.state.decided(known[gap.start : gap.stop]) for gap in self.gaps]
        return np.concatenate(found)

    def holes(self, known: np.ndarray) -> tuple[str, ...]:
        """What fills each hole of a whole answer ``known`` (int64 ``[N]``)."""
        answers = (gap.state.witness for gap in self.gaps)
        return tuple(self.read(answer.tokens[: answer.length].tolist()) for answer in answers)

    def _gather(self) -> None:
        tokens = self.given.copy()
        for gap in self.gaps:
            tokens[gap.start : gap.stop] = gap.state.witness.tokens
        cut = any(gap.state.witness.cut for gap in self.gaps)
        self.witness = replace(self.witness, tokens=tokens, cut=cut)


def _inside(gap: HoleAnswer, positions: np.ndarray) -> np.ndarray:
    """Rows of ``positions`` (int64, ascending) that lie in the hole."""
    return np.flatnonzero((positions >= gap.start) & (positions < gap.stop))
