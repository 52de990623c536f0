"""The child process that also looks for the first answer under a grammar: ``compile.worker`` with a search.

Run as ``python -m mmserve.constraint.search.first_witness``; imports no torch. The parser's limits bound each step
that native code takes, the worker's timers all of them together.
"""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLParserLimits

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.begun import FirstAnswers
from mmserve.constraint.compile.cfg import Sketch
from mmserve.constraint.compile.vocabulary import Vocabulary
from mmserve.constraint.compile.worker import serve
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.search import matcher
from mmserve.constraint.search.completion import Work
from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.shortest_completion import find_completion
from mmserve.constraint.search.sketch import complete_sketch
from mmserve.constraint.search.vocabulary import Vocabulary as Tokens

#: More tokens than any budget has.
_ENDLESS = 1 << 30
#: States of the parser that a sketched sentence may take.
_SKETCHED = 4000


class Searching:
    """Looks for first answers over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = Tokens.spelled(vocabulary.tokens, vocabulary.ends or (vocabulary.end,))
        self._lexicon = Lexicon.of(self._tokens.token_bytes)
        self.trie = self._tokens.trie
        self.longest = max(map(len, self._tokens.token_bytes), default=1)

    def first(self, grammar: Grammar, budget: int, least: int, closes: Callable[[FirstAnswers], None]) -> None:
        """As ``compile.worker.Program``: the same for the same grammar and budget."""
        limits = LLParserLimits(**PARSER_LIMITS)
        compiled = matcher.Grammar(grammar.text, self._tokens, limits)
        closes(find_first(compiled, self._lexicon, budget, least, closes, grammar.sketch))


def find_first(
    grammar: matcher.Grammar,
    lexicon: Lexicon,
    budget: int,
    least: int = 0,
    closes: Callable[[FirstAnswers], None] = lambda first: None,
    sketch: Sketch | None = None,
) -> FirstAnswers:
    """The shortest answers found under ``grammar``: by a long search only where ``budget`` asks for it.

    ``closes`` is told what is known before that; ``sketch`` is a sentence, word by word, where one is known.
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


if __name__ == "__main__":
    serve(Searching)
