"""The first answers under a grammar, found before its first request is admitted.

For a context-free grammar the search begins with a sketch, one sentence of the grammar as words
(``compile.derivation``). The parser may split a text into other words than the grammar (it takes the longest possible
one), so words may need a gap between them; and only the parser decides what is a document under a schema. So every
sketch is read by the parser once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmserve.constraint.compile.derivation import Sketch
from mmserve.constraint.compile.wire import FirstAnswers
from mmserve.constraint.search.completion import FORK, MASK, Walk, Work, onward
from mmserve.constraint.search.matcher import Grammar, Matcher
from mmserve.constraint.search.shortest_completion import find_completion
from mmserve.constraint.search.vocabulary import Lexicon

#: Words up to which gaps that are not needed are looked for.
_WORDS = 200
#: Steps of a walk through a word whose text is not known.
_STEPS = 400


def complete_sketch(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, work: Work) -> Walk | None:
    """The completion that ``sketch`` is from ``matcher`` on; None where the parser does not take it."""
    count = len(sketch.words)
    found = _read_sketch(matcher, lexicon, sketch, [False] * count, work)
    if found is not None or sketch.gap is None:
        return found
    gaps = [state > 0 for state in range(count)]
    found = _read_sketch(matcher, lexicon, sketch, gaps, work)
    for state in range(1, count if count <= _WORDS and found is not None else 0):
        gaps[state] = False
        shorter = _read_sketch(matcher, lexicon, sketch, gaps, work) if work.left else None
        gaps[state] = shorter is None
        found = shorter or found
    return found


def _read_sketch(matcher: Matcher, lexicon: Lexicon, sketch: Sketch, gaps: Sequence[bool], work: Work) -> Walk | None:
    """``sketch`` with a gap before the words that ``gaps`` marks, if that is a completion."""
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
    step: list[int] = []  # rest of the latest step: the text after the word may begin inside it
    for steps in range(_STEPS):
        if at.accepting if ahead is None else steps and at.valid(ahead) == len(ahead):
            return True
        if not step:
            step, chosen = onward(at, lexicon, tokens)
            if not step or not work.spend(MASK):
                return False
            if chosen:
                choices.append(len(tokens))
        try:
            at.consume(step[:1])
        except ValueError:
            return False
        tokens.append(step[0])
        step = step[1:]
    return False


def _bytewise(text: str, lexicon: Lexicon) -> list[int] | None:
    """Tokens that spell ``text``, of one byte each where there are such."""
    raw = text.encode()
    single = [lexicon.ids.get(raw[i : i + 1]) for i in range(len(raw))]
    known = [token for token in single if token is not None]
    return known if len(known) == len(single) else lexicon.cover(raw)


#: More tokens than any budget has.
_ENDLESS = 1 << 30
#: States of the parser that a sketched sentence may take.
_SKETCHED = 4000


def find_first(
    grammar: Grammar,
    lexicon: Lexicon,
    budget: int,
    least: int = 0,
    closes: Callable[[FirstAnswers], None] = lambda first: None,
    sketch: Sketch | None = None,
) -> FirstAnswers:
    """The shortest answers found under ``grammar``: by a long search only where ``budget`` asks for it.

    ``closes`` is called with the result so far before a long search; ``sketch``: a known sentence, word by word.
    """
    begun = None if sketch is None else complete_sketch(grammar.apart().start(), lexicon, sketch, Work(_SKETCHED))
    near = find_completion(grammar.start(), lexicon, classes=grammar.classes, room=_ENDLESS, begun=begun)
    found = FirstAnswers(near, least=least)
    if found.covers(budget) and near is not None:
        return found
    closes(found)
    bound = None if near is None else near.tokens
    patient = find_completion(
        grammar.apart().start(), lexicon, classes=grammar.classes, room=0, bound=bound, searched=True
    )
    return FirstAnswers(near, patient, asked=True, least=least)
