"""Completions of texts with strings that no few bytes bring to an end, such as those that must hold a given word.

Of what may follow in a string only some leads on, and no parser says which. So the nearest end of a string is looked
for, by ASCII characters, from one of all states at which the same is left of every expression (``likeness``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import numpy as np

from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import FORK, MASK, Walk, Work, after, onward
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.prefix_equivalence import PrefixClasses

_LONGEST = 32_768  # tokens of a completion
_CHARACTERS = frozenset(bytes([code]) for code in range(0x20, 0x7F) if code != ord("\\"))


def complete_strings(matcher: Matcher, lexicon: Lexicon, classes: PrefixClasses, work: Work) -> Walk | None:
    """As ``completion.walk``, but through each string by the shortest way; None if it does not arrive.

    ``classes``: classes of texts from the one after ``matcher`` on. Raises ``ValueError`` where they are unknown.
    """
    at, prefix_class = matcher.fork(), classes.start()
    tokens, choices = list[int](), list[int]()
    while work.spend(MASK) and len(tokens) < _LONGEST:
        if at.accepting:
            return Walk(tuple(tokens), tuple(choices))
        step, chosen = onward(at, lexicon, tokens)
        if chosen and classes.open(prefix_class):
            step = _to_the_end(at, prefix_class, lexicon, classes, work)
        if not step:
            return None
        if chosen:
            choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return None
        prefix_class = classes.after(prefix_class, lexicon.text(step))
        tokens += step
    return None


def _to_the_end(
    matcher: Matcher, prefix_class: Hashable, lexicon: Lexicon, classes: PrefixClasses, work: Work
) -> list[int]:
    """Fewest characters to where the string is over, or the text may end; none where that is too far."""
    plain = np.array([token for token in lexicon.closers.tolist() if lexicon.text([token]) in _CHARACTERS], np.int64)
    queue: deque[tuple[Hashable, Matcher, tuple[int, ...]]] = deque([(prefix_class, matcher, ())])
    seen = {prefix_class}
    while queue and work.spend(MASK):
        prefix_class, at, tokens = queue.popleft()
        for token in plain[at.among(plain)].tolist():
            try:
                behind = classes.after(prefix_class, lexicon.text([token]))
            except ValueError:
                continue
            if behind in seen:
                continue
            seen.add(behind)
            work.read(FORK)
            fork = after(at, [token])
            if fork is None:
                continue
            if fork.accepting or not classes.open(behind):
                return [*tokens, token]
            queue.append((behind, fork, (*tokens, token)))
    return []
