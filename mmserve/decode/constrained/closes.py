"""The shortest answers of grammars: the same for every request, so each is looked for once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from mmserve.decode.constraint.matcher import Grammar
from mmserve.decode.paths.least import Close, shortest_close
from mmserve.decode.paths.lexicon import Lexicon

#: Grammars whose answers are kept, those asked for last. An answer is a few tokens, at worst some thousands.
_KEPT = 1024
#: More tokens than any budget has.
_ENDLESS = 1 << 30


class Closes:
    """The shortest answers of grammars over one vocabulary; may be called from any thread.

    What is found depends on the grammar and the budget alone, not on what was asked before.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._found: OrderedDict[tuple[bytes, bool], Close | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, grammar: Grammar, budget: int) -> Close | None:
        """The shortest answer found under ``grammar``, as ``shortest_close`` finds it with room for ``budget``."""
        near = self._close(grammar)
        if near is not None and (near.exact or len(near.tokens) <= budget):
            return near
        return self._close(grammar, patient=True, bound=None if near is None else near.tokens)

    def _close(self, grammar: Grammar, *, patient: bool = False, bound: tuple[int, ...] | None = None) -> Close | None:
        """``patient``: whether an exact answer is worth a far longer search, from the ``bound`` of the first one on."""
        key = hashlib.sha256(grammar.source.encode()).digest(), patient
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        room = 0 if patient else _ENDLESS
        close = shortest_close(
            grammar.apart().start(), self._lexicon, kinds=grammar.kinds, room=room, bound=bound, searched=patient
        )
        with self._lock:
            self._found[key] = close
            if len(self._found) > _KEPT:
                self._found.popitem(last=False)
        return close
