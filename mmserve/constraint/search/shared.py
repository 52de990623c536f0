"""What searches have learned of grammars, kept for the requests to come: the first steps of a request are else dear."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from mmserve.constraint.search.lexicon import Lexicon
from mmserve.constraint.search.matcher import Grammar
from mmserve.constraint.search.parser_states import ParserStateCache

#: Bytes that the states of all grammars may take together, those of requests under way aside.
LIMIT = 64 << 20
#: Bytes that any grammar counts for, and those for each byte of its text: its parser. Measured, and rounded up.
_GRAMMAR, _BYTE = 400_000, 50


class SharedParserStates:
    """The states of grammars over one vocabulary, of those asked for last; may be called from any thread."""

    def __init__(self, lexicon: Lexicon, limit: int = LIMIT) -> None:
        self._lexicon, self._limit = lexicon, limit
        self._states: OrderedDict[tuple[str, bytes], tuple[ParserStateCache, int]] = (
            OrderedDict()
        )  # and bytes of its parser
        self._lock = threading.Lock()

    def of(self, grammar: Grammar, cache: str = "") -> ParserStateCache:
        """The states of ``grammar``, the same for each request of the tenants of ``cache`` while they are kept."""
        key = cache, hashlib.sha256(grammar.source.encode()).digest()
        with self._lock:
            if key not in self._states:
                parsers = 2 * (_GRAMMAR + _BYTE * len(grammar.source))  # one of them is no request's
                states = ParserStateCache(self._lexicon, grammar.classes, lambda: grammar.apart().start())
                self._states[key] = states, parsers
            self._states.move_to_end(key)
            while len(self._states) > 1 and self.used > self._limit:
                self._states.popitem(last=False)
            return self._states[key][0]

    @property
    def used(self) -> int:
        """About so many bytes are kept."""
        return sum(parser + states.size for states, parser in self._states.values())
