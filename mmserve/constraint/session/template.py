"""Templates: fixed texts with holes, each hole with its own grammar and witness.

On a diffusion model's canvas the texts are given, and the holes are filled in parallel; their witnesses are
independent. If a hole's text is shorter than the hole, end tokens pad the rest; they are not part of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from tokenizers import Tokenizer

from mmserve.constraint.search.lattice import TopK
from mmserve.constraint.search.matcher import BoundedHole, Concatenation, Grammar, completes
from mmserve.constraint.search.vocabulary import Lexicon, Vocabulary
from mmserve.constraint.search.witness import Witness, admit
from mmserve.constraint.session.answer import ConstrainedAnswer
from mmserve.constraint.session.observer import Meter
from mmserve.constraint.session.validation import AnswerValidator
from mmserve.core.constraint import Hole, Template
from mmserve.errors import FieldViolation, InvalidArgument


@dataclass(frozen=True)
class Layout:
    """The positions of a template's texts and holes in an answer of ``N`` positions."""

    fixed: np.ndarray  # int64 [N], -1 in holes; an end token and padding after the template
    holes: tuple[tuple[int, Witness], ...]  # first position and first witness of each


def laid_out(parts: Sequence[Sequence[int] | Witness], size: int, ends: tuple[int, int]) -> Layout:
    """The layout of texts (as tokens) and holes on ``size`` positions.

    ``ends``: the end token, and the padding token. Raises ``InvalidArgument`` if there are too few positions.
    """
    needed = sum(len(part.tokens) if isinstance(part, Witness) else len(part) for part in parts)
    if needed > size:
        raise too_small(needed, size)
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
    """A hole of one request: its first position in the answer, and its state, with positions relative to that one."""

    start: int
    state: ConstrainedAnswer

    @property
    def stop(self) -> int:
        """The position after the hole."""
        return self.start + len(self.state.witness.tokens)


@dataclass(kw_only=True)
class TemplateAnswer(ConstrainedAnswer):
    """The holes of one request. ``witness`` is that of the whole answer, joined from those of the holes, without a
    matcher. ``given``: the texts, and the padding after them.

    Each method applies that of ``ConstrainedAnswer`` to every hole.
    """

    gaps: tuple[HoleAnswer, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        lexicon: Lexicon,
        warnings: tuple[str, ...],
        validators: tuple[AnswerValidator | None, ...] = (),
    ) -> TemplateAnswer:
        """The answer of a new request."""
        meter = Meter()
        gaps = tuple(
            HoleAnswer(start, ConstrainedAnswer(witness, lexicon, meter=meter)) for start, witness in layout.holes
        )
        whole = replace(layout.holes[0][1], tokens=layout.fixed, length=len(layout.fixed))
        made = cls(whole, lexicon, warnings, validators=validators, meter=meter, gaps=gaps, given=layout.fixed)
        made._gather()
        return made

    @property
    def weight(self) -> int:
        return sum(gap.state.weight for gap in self.gaps)

    def another(self, *, own_parsers: bool) -> TemplateAnswer:
        holes = ((gap.start, gap.state.another(own_parsers=own_parsers).witness) for gap in self.gaps)
        return TemplateAnswer.of(Layout(self.given, tuple(holes)), self.lexicon, self.warnings, self.validators)

    @property
    def content(self) -> np.ndarray:
        found = self.given >= 0
        for gap in self.gaps:
            found[gap.start : gap.stop] = gap.state.content
        return found

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple((gap.start, gap.stop) for gap in self.gaps)

    @property
    def padded(self) -> bool:
        return True  # end tokens pad holes

    @property
    def unread(self) -> int:
        return 0  # all given tokens are read

    def pass_input(self, tokens: np.ndarray, mask_id: int) -> np.ndarray:
        return tokens

    def allowed(self, positions: np.ndarray, *, causal: bool) -> dict[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for gap in self.gaps:
            rows = _inside(gap, positions)
            inner = gap.state.allowed(positions[rows] - gap.start, causal=causal)
            found |= {int(rows[row]): ids for row, ids in inner.items()}
        return found

    def search(self, known: np.ndarray, top: TopK, end: int) -> None:
        for gap in self.gaps:
            rows = _inside(gap, top.positions)
            if len(rows):
                inner = replace(top.rows(rows), positions=top.positions[rows] - gap.start)
                gap.state.search(known[gap.start : gap.stop], inner, min(end, gap.stop) - gap.start)
        self._gather()

    def advance(self, known: np.ndarray) -> None:
        for gap in self.gaps:
            gap.state.advance(known[gap.start : gap.stop])
        self._gather()

    def padding_positions(self, known: np.ndarray) -> np.ndarray:
        found = [np.zeros(0, np.int64)]
        for gap in self.gaps:
            inner, length = known[gap.start : gap.stop], gap.state.witness.length
            if (inner[:length] >= 0).all() and (inner[length:] >= 0).any():
                found.append(gap.start + np.flatnonzero(inner < 0))
        return np.concatenate(found)

    def decided(self, known: np.ndarray) -> np.ndarray:
        found = [gap.start + gap.state.decided(known[gap.start : gap.stop]) for gap in self.gaps]
        return np.concatenate(found)

    def holes(self, known: np.ndarray) -> tuple[str, ...]:
        answers = (gap.state.witness for gap in self.gaps)
        return tuple(self.read(answer.tokens[: answer.length].tolist()) for answer in answers)

    def _gather(self) -> None:
        tokens = self.given.copy()
        for gap in self.gaps:
            tokens[gap.start : gap.stop] = gap.state.witness.tokens
        cut = any(gap.state.witness.cut for gap in self.gaps)
        self.witness = replace(self.witness, tokens=tokens, cut=cut)


def _inside(gap: HoleAnswer, positions: np.ndarray) -> np.ndarray:
    """Rows of ``positions`` (int64, ascending) that are in the hole."""
    return np.flatnonzero((positions >= gap.start) & (positions < gap.stop))


@dataclass(frozen=True)
class OpenedHole:
    """A hole with its compiled grammar and first witness."""

    grammar: Grammar
    witness: Witness  # on ``max_tokens`` positions
    warnings: tuple[str, ...] = ()  # for the client
    validator: AnswerValidator | None = None  # if the grammar is wider than the constraint
    longest: int | None = None  # bytes of the longest text; None = unknown


def opened(template: Template, open_hole: Callable[[Hole], OpenedHole]) -> list[str | OpenedHole]:
    """``template`` with its holes opened and adjacent texts joined; field names in errors of a hole are prefixed by its
    index."""
    found: list[str | OpenedHole] = []
    for i, part in enumerate(template.parts):
        try:
            found.append(part if isinstance(part, str) else open_hole(part))
        except InvalidArgument as error:
            place = f"constraint.template.parts[{i}].hole"
            violations = (FieldViolation(f"{place}.{v.field}", v.description) for v in error.violations)
            raise InvalidArgument(*violations) from error
    joined: list[str | OpenedHole] = []
    for is_text, parts in groupby(found, lambda part: isinstance(part, str)):
        run = list(parts)
        joined += ["".join(map(str, run))] if is_text else run
    return joined


def spelling(text: str, tokenizer: Tokenizer, lexicon: Lexicon) -> list[int]:
    """``text`` as tokenised by the model, or with the fewest tokens; without special tokens."""
    raw = text.encode()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if all(0 <= i < len(lexicon.spelled) for i in ids) and lexicon.text(ids) == raw:
        return ids
    covered = lexicon.cover(raw)
    if covered is None:
        raise InvalidArgument.of("constraint.template", f"the model has no tokens for the text {text[:60]!r}")
    return covered


def one_by_one(parts: Sequence[str | OpenedHole], vocabulary: Vocabulary, lexicon: Lexicon, budget: int) -> Witness:
    """The first witness of the whole template as one language (a ``Concatenation``).

    Raises ``InvalidArgument`` or ``Infeasible`` if ``budget`` is too small.
    """
    texts, holes = [b""], list[BoundedHole]()
    begun: list[int] = []
    for part in parts:
        if isinstance(part, str):
            texts[-1] = part.encode()
            begun += lexicon.cover(texts[-1]) or []
        else:
            holes.append(BoundedHole(part.grammar, len(part.witness.tokens)))
            texts.append(b"")
            begun += part.witness.tokens[: part.witness.length].tolist()
    language = Concatenation(tuple(texts), tuple(holes), vocabulary)
    start = language.start()
    if not completes(start, begun):  # the hole's shortest answer contains the text after it
        return admit(language, lexicon, budget)
    if len(begun) > budget:
        raise too_small(len(begun), budget)
    tokens = np.full(budget, min(vocabulary.end_ids), np.int64)
    tokens[: len(begun)] = begun
    return Witness(tokens, len(begun), start, 0, vocabulary.end_ids, language=language)


def too_small(needed: int, budget: int) -> InvalidArgument:
    """The error for a budget below ``needed``."""
    why = f"must be at least {needed} for the template, not {budget}"
    return InvalidArgument.of("sampling.max_new_tokens", why)
