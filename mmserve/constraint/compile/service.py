"""Grammars for requests: cached, compiled and proved elsewhere, refused with reasons."""

from __future__ import annotations

from math import inf

from mmserve.constraint.compile.attempts import Grammar
from mmserve.constraint.compile.begun import FirstAnswers
from mmserve.constraint.compile.cache import Firsts, Outcomes, key_of
from mmserve.constraint.compile.child import PROGRAM
from mmserve.constraint.compile.grammar import kind_of
from mmserve.constraint.compile.process import Compiler
from mmserve.constraint.compile.vocabulary import Vocabulary
from mmserve.constraint.findings import Refused, as_error
from mmserve.constraint.limits import CACHE_BYTES, CLOSES, COMPILE_SECONDS, LATE_SECONDS
from mmserve.core.constraint import ConstraintSpec


class Grammars:
    """Turns constraints into grammars for one vocabulary; may be called from any thread, and blocks it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        seconds: float = COMPILE_SECONDS,
        cache_bytes: int = CACHE_BYTES,
        program: str = PROGRAM,
    ) -> None:
        self._fingerprint = vocabulary.fingerprint()
        self._outcomes = Outcomes(cache_bytes)
        self._firsts = Firsts(CLOSES)
        self._compiler = Compiler(vocabulary, seconds, program=program)
        self._compiler.warm()

    def grammar(self, spec: ConstraintSpec, cache: str = "") -> Grammar:
        """The grammar of ``spec``, which a matcher may run under ``limits.PARSER_LIMITS``.

        Takes microseconds when a tenant of ``cache`` asked for it before, else milliseconds, at worst ``seconds`` of
        processor time and a wait for those before it. Raises ``InvalidArgument`` with a violation for every reason
        why there is none, ``Unavailable`` where nothing can be compiled.
        """
        key = key_of(spec, self._fingerprint, cache)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome, lasting = self._compiler.compile(spec)
            if lasting:
                self._outcomes.put(key, outcome)
        return _granted(spec, outcome)

    def first(self, spec: ConstraintSpec, budget: int, cache: str = "") -> tuple[Grammar, FirstAnswers]:
        """The grammar of ``spec``, and the shortest answers found under it where there is room for ``budget`` tokens.

        Raises as ``grammar``; ``program`` must be one that looks for answers.
        """
        key = key_of(spec, self._fingerprint, cache)
        outcome, first = self._outcomes.get(key), self._firsts.get(key)
        if outcome is None or (isinstance(outcome, Grammar) and (first is None or not first.covers(budget))):
            begun = self._compiler.begin(spec, budget)
            outcome, first = begun.outcome, begun.first
            if begun.lasting or first is not None:
                self._outcomes.put(key, outcome)
            if first is not None:
                self._firsts.put(key, first, inf if begun.lasting else LATE_SECONDS)
        grammar = _granted(spec, outcome)
        assert first is not None  # every grammar that a child gives comes with one
        return grammar, first

    def close(self) -> None:
        """End the child processes."""
        self._compiler.close()


def _granted(spec: ConstraintSpec, outcome: Grammar | Refused) -> Grammar:
    if isinstance(outcome, Refused):
        raise as_error(kind_of(spec), outcome.findings)
    return outcome
