"""Completions from a sketch: a sentence of a context-free grammar, word by word (``compile.derivation``).

The parser may read the words in another way than the grammar does: it takes the longest word that may stand at a state,
so that words may need a gap between them, and it says alone what is a document under a schema. So all that comes of a
sketch is read by the parser once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.constraint.compile.cfg import Sketch
from mmserve.constraint.search.base import Matcher
from mmserve.constraint.search.completion import FORK, MASK, Walk, Work, onward
from mmserve.constraint.search.lexicon import Lexicon

#: Words up to which gaps that are not needed are looked for.
_WORDS = 200
#: Steps of a walk through a word whose text is not known.
_STEPS = 400


def complete_sketch(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, work: Work) -> Walk | None:
    """The completion that ``sketch`` is from ``matcher`` on; None where the parser does not take it."""
    count = len(sketch.words)
    found = _spoken(matcher, lexicon, sketch, [False] * count, work)
    if found is not None or sketch.gap is None:
        return found
    gaps = [state > 0 for state in range(count)]
    found = _spoken(matcher, lexicon, sketch, gaps, work)
    for state in range(1, count if count <= _WORDS and found is not None else 0):
        gaps[state] = False
        shorter = _spoken(matcher, lexicon, sketch, gaps, work) if work.left else None
        gaps[state] = shorter is None
        found = shorter or found
    return found


def _spoken(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, gaps: Sequence[bool], work: Work) -> Walk | None:
    """``sketch`` with a gap before the words that ``gaps`` says, if that is a completion."""
    at, tokens, choices = matcher.fork(), list[int](), list[int]()
    work.read(FORK)
    texts = [
        None if word is None else (sketch.gap or "") * gap + word for word, gap in zip(sketch.words, gaps, strict=True)
    ]
    for state, text in enumerate(texts):
        step = None if text is None else _bytewise(text, lexicon)
        if step is None:
            ahead = next((_bytewise(later, lexicon) for later in texts[state + 1 :] if later is not None), None)
            if text is not None or not _through(at, lexicon, tokens, choices, ahead, work):
                return None
            continue
        if not work.spend(len(step)):
            return None
        choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return None
        tokens += step
    return Walk(tuple(tokens), tuple(choices)) if at.accepting else None


def _through(
    at: Matcher, lexicon: Lexicon, tokens: list[int], choices: list[int], ahead: list[int] | None, work: Work
) -> bool:
    """Move ``at`` through a word whose text is not known, up to where ``ahead`` may follow, or the end."""
    for steps in range(_STEPS):
        if at.accepting if ahead is None else steps and at.valid(ahead) == len(ahead):
            return True
        step, chosen = onward(at, lexicon, tokens)
        if not step or not work.spend(MASK):
            return False
        if chosen:
            choices.append(len(tokens))
        try:
            at.consume(step)
        except ValueError:
            return False
        tokens += step
    return False


def _bytewise(text: str, lexicon: Lexicon) -> list[int] | None:
    """Tokens that spell ``text``, of one byte each where there are such."""
    raw = text.encode()
    single = [lexicon.ids.get(raw[i : i + 1]) for i in range(len(raw))]
    known = [token for token in single if token is not None]
    return known if len(known) == len(single) else lexicon.cover(raw)
