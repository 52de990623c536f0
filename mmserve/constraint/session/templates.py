"""A template for one model: its texts as tokens, a grammar and a first witness for each hole, all within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from tokenizers import Tokenizer

from mmserve.constraint.search.completion import completes
from mmserve.constraint.search.concatenation import BoundedHole, Concatenation
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.vocabulary import Vocabulary
from mmserve.constraint.search.witness import Witness, admit
from mmserve.constraint.session.judge import Judge
from mmserve.constraint.session.template import Layout, laid_out
from mmserve.core.constraint import Hole, Template
from mmserve.errors import FieldViolation, InvalidArgument


@dataclass(frozen=True)
class OpenedHole:
    """A hole that can be filled: its grammar, the first witness of its ``max_tokens`` positions, what the client is
    told, who judges what fills it, if its grammar is wider than its constraint, and how many bytes that has at most."""

    grammar: Grammar
    witness: Witness
    warnings: tuple[str, ...] = ()
    judge: Judge | None = None
    longest: int | None = None  # None = no bound is known


def opened(template: Template, open_hole: Callable[[Hole], OpenedHole]) -> list[str | OpenedHole]:
    """``template`` with its holes opened and neighbouring texts joined. What is wrong with a hole is told with its
    place."""
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
    """``text`` as the model's own tokens, or in the fewest that spell it; none of them is special."""
    raw = text.encode()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if all(0 <= i < len(lexicon.spelled) for i in ids) and lexicon.text(ids) == raw:
        return ids
    covered = lexicon.cover(raw)
    if covered is None:
        raise InvalidArgument.of("constraint.template", f"the model has no tokens for the text {text[:60]!r}")
    return covered


def side_by_side(parts: Sequence[list[int] | Witness], budget: int, ends: tuple[int, int]) -> Layout:
    """All holes on a canvas of ``budget`` positions. Raises ``InvalidArgument`` where it is too small."""
    needed = sum(len(part.tokens) if isinstance(part, Witness) else len(part) for part in parts)
    if needed > budget:
        raise too_small(needed, budget)
    return laid_out(parts, budget, ends)


def one_by_one(parts: Sequence[str | OpenedHole], vocabulary: Vocabulary, lexicon: Lexicon, budget: int) -> Witness:
    """The first witness of all of the template, as one language (a ``Concatenation``).

    Raises ``InvalidArgument`` or ``Infeasible`` for too small a ``budget``.
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
    if not completes(start, begun):  # the text after a hole stands in the hole's own shortest one
        return admit(language, lexicon, budget)
    if len(begun) > budget:
        raise too_small(len(begun), budget)
    tokens = np.full(budget, min(vocabulary.end_ids), np.int64)
    tokens[: len(begun)] = begun
    return Witness(tokens, len(begun), start, 0, vocabulary.end_ids, language=language)


def too_small(needed: int, budget: int) -> InvalidArgument:
    """The refusal of a budget."""
    why = f"must be at least {needed} for the template, not {budget}"
    return InvalidArgument.of("sampling.max_new_tokens", why)
